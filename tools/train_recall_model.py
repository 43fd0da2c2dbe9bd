"""Trains the bundled recall model and refuses to save one that can do without part of its memory.

    python tools/train_recall_model.py --out src/stateferry/models/recall_gdn --minutes 6

Three kinds of question are asked of each story. A person's place needs two look-ups: from the person
to the thing (a recurrent layer must do that one, since the attention layer comes last) and from the
thing to the place. To leave the second one to attention alone, the delta matrices of most training
sequences are emptied after the places have been told. Nothing is emptied in use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from stateferry.models import RECALL_GDN
from stateferry.models.damage import LENGTHS, refusals, survey, table
from stateferry.models.gdn import gdn_config
from stateferry.models.prompts import Question, cast, questions, story, token_ids
from stateferry.models.random_checkpoint import write_json
from stateferry.models.tokenizer import write_word_tokenizer
from stateferry.models.torch_model import TinyQwen3Next
from stateferry.models.words import EOS_ID, PAD_ID, VOCABULARY

ANSWER, NAME, OTHER, NOTHING = 0, 1, 2, 3  # what a position must predict
LOSS_WEIGHTS = (1.0, 0.3, 0.05)


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum; `until` is a share of the training time."""

    until: float
    pairs: int
    length: int
    batch: int


CURRICULA = {
    "try": (Stage(1.0, 2, 48, 32),),
    "full": (
        Stage(0.15, 4, 96, 128),
        Stage(0.40, 8, 192, 128),
        Stage(0.55, 8, 448, 128),
        Stage(1.00, 8, 1344, 64),
    ),
}


class Stories(IterableDataset[tuple[torch.Tensor, ...]]):
    """Endless batches of (tokens, what each position predicts, where to forget or -1)."""

    def __init__(self, stage: Stage, seed: int, forgetful: float) -> None:
        self.stage, self.seed, self.forgetful = stage, seed, forgetful

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}:{self.stage}:{worker.id if worker else 0}")
        while True:
            rows = [self._row(rng) for _ in range(self.stage.batch)]
            yield tuple(torch.tensor(column) for column in zip(*rows, strict=True))

    def _row(self, rng: random.Random) -> tuple[list[int], list[int], int]:
        length = self.stage.length
        pairs = rng.randint(1, self.stage.pairs)
        asked = min(pairs + 1, (length - 12 * pairs) // 6)
        room = length - 12 * pairs - 6 * asked
        filler = 0 if room < 2 or rng.random() < 0.1 else rng.randint(2, room)
        holders = cast(rng, pairs)
        words, boundary = story(rng, holders, filler)
        # A question is six words: four asked, the answer, a full stop. Position t predicts word t + 1.
        predicts = [OTHER] * (len(words) + 3) + [ANSWER, OTHER, OTHER, OTHER, NAME, NAME] * asked
        kind = rng.choices([*Question], [0.6, 0.2, 0.2])[0]
        words += questions(holders, rng.randrange(pairs), asked, kind)
        predicts = predicts[: len(words) - 1] + [NOTHING] * (length - len(words) + 1)
        tokens = [*token_ids(words), *[PAD_ID] * (length - len(words))]
        return tokens, predicts, boundary if rng.random() < self.forgetful else -1


class Trainer:
    """Steps of one model, replayed as CUDA graphs where there is CUDA (the kernels are tiny)."""

    def __init__(self, model: TinyQwen3Next, args: argparse.Namespace, device: str) -> None:
        self.model, self.device = model, device
        self.graphs = device == "cuda" and not args.eager
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        self.rate = torch.tensor(0.0, device=device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": args.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.rate,
            betas=(0.9, 0.98),
            capturable=device == "cuda",
        )
        self.sums = torch.zeros(4, device=device)  # right answers, losses of names and others, steps
        self.inputs: list[torch.Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, batch: list[torch.Tensor]) -> None:
        """For a stage: batches like this one follow."""
        self.inputs = [part.to(self.device) for part in batch]
        if not self.graphs:
            return
        self.graph = None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph

    def __call__(self, batch: list[torch.Tensor], rate: float) -> None:
        self.rate.fill_(rate)
        for mine, new in zip(self.inputs, batch, strict=True):
            mine.copy_(new, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            loss = self._loss(*self.inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()

    def _loss(self, tokens: torch.Tensor, predicts: torch.Tensor, boundary: torch.Tensor) -> torch.Tensor:
        forget = torch.arange(tokens.shape[1], device=tokens.device) == boundary[:, None]
        hidden, _ = self.model(tokens, forget=forget)
        logits = self.model.logits(hidden[:, :-1])
        targets = tokens[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        masks = [(predicts[:, :-1] == kind).float() for kind in (ANSWER, NAME, OTHER)]
        parts = [(losses * mask).sum() / mask.sum().clamp(min=1.0) for mask in masks]
        with torch.no_grad():
            hits = (logits.argmax(-1) == targets).float() * masks[ANSWER]
            right = hits.sum() / masks[ANSWER].sum()
            self.sums += torch.stack([right, parts[NAME], parts[OTHER], torch.ones_like(right)])
        return sum(
            (w * part for w, part in zip(LOSS_WEIGHTS, parts, strict=True)), start=losses.new_zeros(())
        )


def initialise(model: TinyQwen3Next) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, math.log(0.3))
        elif name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -5.0)
        elif "embed_tokens" in name or "lm_head" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[1]))


def train(model: TinyQwen3Next, args: argparse.Namespace, device: str) -> int:
    trainer = Trainer(model, args, device)
    begun = time.monotonic()
    steps = 0
    for stage in CURRICULA[args.curriculum]:
        loader = DataLoader(
            Stories(stage, args.seed, args.forgetful),
            batch_size=None,
            num_workers=args.workers,
            prefetch_factor=8 if args.workers else None,
            pin_memory=device == "cuda",
        )
        for index, batch in enumerate(loader):
            share = (time.monotonic() - begun) / (60 * args.minutes)
            if share >= stage.until:
                break
            if index == 0:
                trainer.prepare(batch)
            cosine = 0.5 * (1 + math.cos(math.pi * share))
            trainer(batch, args.rate * min(1.0, (steps + 1) / args.warmup) * (0.02 + 0.98 * cosine))
            steps += 1
            if steps % args.every == 0:
                right, name, other, count = trainer.sums.tolist()
                trainer.sums.zero_()
                print(
                    f"{share:6.1%} step {steps} length {stage.length} answers right {right / count:.4f}"
                    f" loss of names {name / count:.3f} of others {other / count:.3f}",
                    flush=True,
                )
    return steps


def load(model: TinyQwen3Next, folder: Path) -> None:
    from safetensors.torch import load_file

    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})


def save(model: TinyQwen3Next, config: dict[str, Any], folder: Path, report: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "training_report.json", report)
    write_word_tokenizer(folder)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECALL_GDN)
    parser.add_argument(
        "--evaluate", type=Path, help="folder of a checkpoint whose report to renew; no training"
    )
    parser.add_argument("--draft", type=Path, help="folder to save in whatever the figures are")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--curriculum", choices=CURRICULA, default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--forgetful", type=float, default=0.8, help="share of sequences made to forget")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--every", type=int, default=500, help="steps between two lines of progress")
    parser.add_argument("--per-length", type=int, default=256, help="prompts of each length to evaluate on")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    host = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = gdn_config(
        vocab_size=len(VOCABULARY), eos_token_id=EOS_ID, pad_token_id=PAD_ID, hidden_size=args.hidden
    )
    model = TinyQwen3Next(config).to(device)
    lengths = LENGTHS
    if args.evaluate:
        load(model, args.evaluate)
        report = json.loads((args.evaluate / "training_report.json").read_text())
    else:
        initialise(model)
        print(sum(p.numel() for p in model.parameters()), "parameters on", device, flush=True)
        report = {
            "steps": train(model, args, device),
            "minutes": args.minutes,
            "seed": args.seed,
            "rate": args.rate,
            "forgetful": args.forgetful,
            "curriculum": [asdict(stage) for stage in CURRICULA[args.curriculum]],
            "host": host,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        longest = max(stage.length for stage in CURRICULA[args.curriculum])
        lengths = tuple(n for n in LENGTHS if n <= longest)
    results = survey(model.to(torch.bfloat16), device, args.per_length, lengths)
    print(table(results))
    report |= {"evaluated_on": host, "prompts_per_length": args.per_length, **results}
    if args.draft:
        save(model, config, args.draft, report)
    problems = refusals(results["accuracy"])
    for problem in problems:
        print("not saved:", problem)
    if not problems:
        save(model, config, args.evaluate or args.out, report)
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
