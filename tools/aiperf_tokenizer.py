"""Run by AIPerf's Python: a tokenizer that makes one token of every word of AIPerf's filler text.

    python aiperf_tokenizer.py HF_HOME

So prompts of so many tokens have so many words, and whoever sees a prompt can count it. Prints the name under
which AIPerf finds it, offline, in that cache; a plain path it does not take.
"""

import importlib.util
import json
import sys
from pathlib import Path

OWNER, NAME, REVISION = "local", "words", "0" * 40


def main() -> None:
    found = importlib.util.find_spec("aiperf.dataset.generator.prompt")
    if found is None or found.origin is None:
        raise SystemExit("aiperf has no dataset.generator.prompt: another version than this was written for")
    text = (Path(found.origin).parent / "assets" / "shakespeare.txt").read_text(encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(["<unknown>", *sorted(set(text.split()))])}
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unknown>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    cache = Path(sys.argv[1]) / "hub" / f"models--{OWNER}--{NAME}"
    snapshot = cache / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)
    (snapshot / "tokenizer.json").write_text(json.dumps(whole))
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    print(f"{OWNER}/{NAME}")


if __name__ == "__main__":
    main()
