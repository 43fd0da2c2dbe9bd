"""Shows that the tiny models really depend on their state, in transformers and in vLLM.

    python tools/check_state_sensitivity.py            # every random family, both ways
    python tools/check_state_sensitivity.py gdn --no-vllm
    python tools/check_state_sensitivity.py recall     # the trained model's answers, served by vLLM

In transformers, the state (or the attention KV) of a prompt's first N-1 tokens is zeroed before the
last token. In vLLM, prompts that end alike but begin differently are asked for their next token; its
log-probabilities must also be those of transformers, which shows that the weights were read right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from stateferry.models import FAMILIES, RECALL_GDN, recall_prompt, write_random_checkpoint

ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROMPTS, TOKENS, COMMON_TOKENS = 8, 500, 300
STATE_AT_LEAST = 0.5  # what zeroing moves a log-probability by, in the least moved prompt
KV_AT_LEAST = 0.1
PREFIX_AT_LEAST = 0.1  # what another beginning moves it by, in vLLM
NOISE_AT_MOST = 0.15  # vLLM computes in bfloat16, transformers here in float32
RECALL_AT_LEAST = 0.99
RECALL_LENGTHS = (20, 64, 100, 250, 640, 1200)


def prompts(seed: int) -> list[list[int]]:
    """Random bytes: pairs of prompts differ in their first 200 tokens and agree in the last 300."""
    rng = random.Random(seed)
    rows = []
    for _ in range(PROMPTS // 2):
        tail = [rng.randrange(256) for _ in range(COMMON_TOKENS)]
        rows += [[rng.randrange(256) for _ in range(TOKENS - COMMON_TOKENS)] + tail for _ in range(2)]
    return rows


def in_transformers(folder: Path) -> tuple[dict[str, float], Any]:
    """What zeroing each part moves the next token's log-probability by, and the undamaged ones."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts(0))

    def next_token(*zeroed: str) -> torch.Tensor:
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            for layer in cache.layers:
                for name in zeroed:
                    for tensor in tensors_of(getattr(layer, name, None)):
                        tensor.zero_()
            return model(ids[:, -1:], past_key_values=cache).logits[:, -1].log_softmax(-1)

    clean = next_token()
    parts = {"state": ("conv_states", "recurrent_states"), "kv": ("keys", "values")}
    moved = {part: float((next_token(*names) - clean).abs().amax(-1).min()) for part, names in parts.items()}
    return moved, clean


def tensors_of(value: Any) -> list[Any]:
    """transformers keeps a layer's states in a tensor, a list or a dictionary."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [item for item in value.values() if item is not None]
    return [item for item in value if item is not None] if isinstance(value, list | tuple) else [value]


def engine(folder: Path, rows: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of vLLM, from a process of its own."""
    job = json.dumps({"folder": str(folder), "rows": rows, "tokens": tokens})
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "answers.json"
        command = [sys.executable, __file__, "--serve", str(result)]
        environment = {**os.environ, **ENGINE_ENVIRONMENT}
        done = subprocess.run(command, input=job, text=True, env=environment, capture_output=True)
        if done.returncode or not result.exists():
            raise RuntimeError(f"vLLM failed on {folder.name}:\n{done.stderr[-3000:]}")
        answers: list[dict[str, Any]] = json.loads(result.read_text())
        return answers


def serve(result: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(
        model=job["folder"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=20,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], logprobs=20, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": row} for row in job["rows"]], sampling, use_tqdm=False)
    answers = []
    for output in outputs:
        first = output.outputs[0].logprobs[0]
        logprobs = {token: entry.logprob for token, entry in first.items()}
        answers.append({"tokens": list(output.outputs[0].token_ids), "logprobs": logprobs})
    result.write_text(json.dumps(answers))


def in_vllm(folder: Path, clean: Any) -> dict[str, float]:
    answers = engine(folder, prompts(0), tokens=16)
    noise, moved = 0.0, []
    for row, answer in enumerate(answers):
        for token, logprob in answer["logprobs"].items():
            noise = max(noise, abs(logprob - float(clean[row, int(token)])))
    for one, other in zip(answers[::2], answers[1::2], strict=True):
        both = one["logprobs"].keys() & other["logprobs"].keys()
        moved.append(max((abs(one["logprobs"][t] - other["logprobs"][t]) for t in both), default=9.9))
    return {
        "noise": noise,
        "prefix": min(moved),
        "texts": float(len({tuple(answer["tokens"]) for answer in answers})),
    }


def check_family(family: str, with_vllm: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_checkpoint(family, Path(scratch) / family)
        moved, clean = in_transformers(folder)
        found = {f"{family}: zeroed {part} moves {size:.2f}": size for part, size in moved.items()}
        wanted = [STATE_AT_LEAST, KV_AT_LEAST]
        problems = [text for (text, size), least in zip(found.items(), wanted, strict=True) if size < least]
        print(*found, sep="\n", flush=True)
        if with_vllm:
            seen = in_vllm(folder, clean)
            print(f"{family}: in vLLM {seen}", flush=True)
            if seen["noise"] > NOISE_AT_MOST:
                problems.append(f"{family}: vLLM differs from transformers by {seen['noise']:.3f}")
            if seen["prefix"] < PREFIX_AT_LEAST or seen["texts"] < PROMPTS:
                problems.append(f"{family}: vLLM's answers hardly depend on the prompt: {seen}")
    return problems


def check_recall(per_length: int) -> list[str]:
    asked = [recall_prompt(2_000_000 + n, length) for length in RECALL_LENGTHS for n in range(per_length)]
    answers = engine(RECALL_GDN, [list(prompt.token_ids) for prompt in asked], tokens=1)
    right = [prompt.answer_id == answer["tokens"][0] for prompt, answer in zip(asked, answers, strict=True)]
    for index, length in enumerate(RECALL_LENGTHS):
        part = right[index * per_length : (index + 1) * per_length]
        print(f"recall: {sum(part)} of {per_length} right with {length} tokens")
    share = sum(right) / len(right)
    print(f"recall: {share:.4f} of {len(right)} right")
    return [] if share >= RECALL_AT_LEAST else [f"recall: {share:.4f} right is below {RECALL_AT_LEAST}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}, or recall")
    parser.add_argument("--no-vllm", action="store_true", help="only transformers")
    parser.add_argument("--per-length", type=int, default=64, help="recall prompts of each length")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    problems = []
    for family in args.families or FAMILIES:
        problems += (
            check_recall(args.per_length) if family == "recall" else check_family(family, not args.no_vllm)
        )
    for problem in problems:
        print("FAILED", problem)
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
