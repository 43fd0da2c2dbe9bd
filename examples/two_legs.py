"""Do by hand what a router does: ask the prefill engine, then the decode engine with what the first one said.

    python examples/two_legs.py http://127.0.0.1:8100 http://127.0.0.1:8200 \
        "the hat is in Quito . Leo Mason has the hat . where is Leo Mason"

Prints the answer, and what the decode engine says that it received.
"""

import argparse
import json
from typing import Any

import httpx

FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks an engine to compute the prompt and to keep it for another."""


def complete(url: str, prompt: str, max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    """One completion, with `kv_transfer_params` beside the usual fields."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "kv_transfer_params": params}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Do by hand what a router does.")
    parser.add_argument("prefill", help="the prefill engine's address")
    parser.add_argument("decode", help="the decode engine's address")
    parser.add_argument("prompt")
    options = parser.parse_args()
    offer = complete(options.prefill, options.prompt, 1, FIRST_LEG)["kv_transfer_params"]
    answer = complete(options.decode, options.prompt, 16, offer)
    print(answer["choices"][0]["text"])
    print(json.dumps(answer["kv_transfer_params"]["stateferry"]["received"], indent=1))


if __name__ == "__main__":
    main()
