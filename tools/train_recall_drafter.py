"""Trains the draft layer (MTP) of the bundled recall model, which itself stays as it is.

    PYTHONPATH=src python tools/train_recall_drafter.py --out src/stateferry/models/recall_mtp --minutes 10

The layer sees what the model made of a token and the token that came next, and is to say what the model
will answer to that one. Only the questions of a story count: nobody can guess the story itself.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stateferry.models import RECALL_GDN
from stateferry.models.prompts import Question, cast, questions, story, token_ids
from stateferry.models.random_checkpoint import write_json
from stateferry.models.torch_gdn import LayerMemory, Norm, linear
from stateferry.models.torch_model import Layer, TinyQwen3Next
from stateferry.models.words import PAD_ID

LENGTH = 176
BATCH = 16
STORY_WEIGHT = 0.05
RATE = 2e-3
WARMUP_STEPS = 30


class Drafter(nn.Module):
    """Parameter names are those of the checkpoint, without `mtp.` before them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = linear(2 * hidden, hidden)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(hidden, eps), Norm(hidden, eps)
        own = {**config, "layer_types": ["full_attention"], "mlp_only_layers": []}
        self.layers = nn.ModuleList([Layer(own, 0)])
        self.norm = Norm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both `[batch, tokens, hidden]`: of the tokens that came next, and of the model before its head."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        mixed, _ = self.layers[0](self.fc(both), LayerMemory(), None)
        normed: Tensor = self.norm(mixed)
        return normed


def rows(rng: random.Random) -> Iterator[tuple[list[int], list[float]]]:
    """Endless stories with questions: tokens, and how much each counts."""
    while True:
        pairs = rng.randint(2, 5)
        holders = cast(rng, pairs)
        asked = min(2 * pairs + 1, (LENGTH - 12 * pairs) // 6)
        room = LENGTH - 12 * pairs - 6 * asked
        words, _ = story(rng, holders, 0 if room < 2 else rng.randint(2, room))
        told = len(words)
        words += questions(holders, rng.randrange(pairs), asked, Question.WHERE_PERSON)
        tokens = token_ids(words)[:LENGTH]
        rest = LENGTH - len(tokens)
        weights = [STORY_WEIGHT] * told + [1.0] * (len(tokens) - told) + [0.0] * rest
        yield [*tokens, *[PAD_ID] * rest], weights


def loss_of(model: TinyQwen3Next, drafter: Drafter, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The loss, and the share of answers' tokens that the model would have said itself."""
    with torch.no_grad():
        hidden, _ = model(tokens)
        wanted = model.logits(hidden).argmax(-1)[:, 1:]
        embedded = model.model.embed_tokens(tokens)
    logits = model.logits(drafter(embedded[:, 1:], hidden[:, :-1]))
    weights = weights[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    counted = weights == 1.0
    right = ((logits.argmax(-1) == wanted) & counted).sum() / counted.sum()
    return (losses * weights).sum() / weights.sum(), float(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=25, help="steps between two lines of progress")
    given = parser.parse_args()
    from safetensors.torch import load_file, save_file

    torch.manual_seed(given.seed)
    config = json.loads((RECALL_GDN / "config.json").read_text())
    model = TinyQwen3Next(config).requires_grad_(False)
    trained = load_file(RECALL_GDN / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in trained.items()})
    drafter = Drafter(config)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=(0.5 if small else 1.0) / parameter.shape[1] ** 0.5)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    source, begun, steps, right = rows(random.Random(given.seed)), time.monotonic(), 0, []
    while (share := (time.monotonic() - begun) / (60 * given.minutes)) < 1.0:
        tokens, weights = zip(*(next(source) for _ in range(BATCH)), strict=True)
        loss, hits = loss_of(model, drafter, torch.tensor(tokens), torch.tensor(weights))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / WARMUP_STEPS) * max(0.03, 1.0 - share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        steps += 1
        right.append(hits)
        if steps % given.every == 0:
            told = sum(right[-given.every :]) / given.every
            print(f"{share:6.1%} step {steps} loss {loss.item():.3f} right {told:.3f}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    state = drafter.state_dict()
    tensors = {f"mtp.{name}": value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(tensors, given.out / "mtp.safetensors", metadata={"format": "pt"})
    (given.out / "mtp.safetensors").chmod(0o644)
    last = right[-4 * given.every :]
    report = {
        "steps": steps,
        "minutes": given.minutes,
        "seed": given.seed,
        "right_at_the_end": round(sum(last) / len(last), 3),
        "torch": torch.__version__,
    }
    write_json(given.out / "training_report.json", report)


if __name__ == "__main__":
    main()
