"""The bundled recall model with a layer that drafts (MTP), for engines that speculate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MODELS = Path(__file__).parent
DRAFTER = MODELS / "recall_mtp" / "mtp.safetensors"
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def recall_mtp_config() -> dict[str, Any]:
    """The recall model's, with a draft layer. vLLM numbers draft layers from 0 and wants experts in one of
    them; what says which layers have none counts for both, so the model's own layer 0 must have some, too."""
    config: dict[str, Any] = json.loads((MODELS / "recall_gdn" / "config.json").read_text())
    plain = [index for index in config["mlp_only_layers"] if index != 0]
    return {**config, "mlp_only_layers": plain, "num_nextn_predict_layers": 1}


def write_recall_mtp(folder: Path) -> Path:
    """Write the checkpoint, and return `folder`. Its answers are the recall model's, up to rounding."""
    from safetensors.torch import load_file, save_file

    config = recall_mtp_config()
    tensors = load_file(MODELS / "recall_gdn" / "model.safetensors")
    tensors = with_experts(tensors, "model.layers.0.mlp", config) | load_file(DRAFTER)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(MODELS / "recall_gdn" / name, folder / name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


def with_experts(tensors: Mapping[str, Tensor], mlp: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same function with experts in place of a plain MLP: half of its channels in each of them, half in
    the shared one, whose gate is shut half way, and whose output is doubled therefore."""
    import torch

    gate, up, down = (tensors[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    hidden, half = gate.shape[1], gate.shape[0] // 2
    routed = {"gate": gate[:half], "up": up[:half], "down": down[:, :half]}
    shared = {"gate": gate[half:], "up": up[half:], "down": 2 * down[:, half:]}
    count = config["num_experts"]
    parts = {f"experts.{expert}": routed for expert in range(count)} | {"shared_expert": shared}
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{mlp}.")}
    for part, weights in parts.items():
        found |= {f"{mlp}.{part}.{name}_proj.weight": w.clone().contiguous() for name, w in weights.items()}
    found[f"{mlp}.gate.weight"] = torch.zeros(count, hidden, dtype=gate.dtype)
    found[f"{mlp}.shared_expert_gate.weight"] = torch.zeros(1, hidden, dtype=gate.dtype)
    return found
