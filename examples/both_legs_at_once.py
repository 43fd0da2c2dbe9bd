"""Send both legs of a hand-off at once: the decode engine queues while the prefill engine still computes.

    python examples/both_legs_at_once.py http://127.0.0.1:8100 127.0.0.1:5600 http://127.0.0.1:8200 \
        "the hat is in Quito . Leo Mason has the hat . where is Leo Mason"

The second argument is where rank 0 of the prefill engine listens: `stateferry serve … --kv-port 5600`.
Prints the answer, and what the decode engine says that it received.
"""

import argparse
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def complete(url: str, prompt: str, max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    """One completion, with `kv_transfer_params` beside the usual fields."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "kv_transfer_params": params}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Send both legs of a hand-off at once.")
    parser.add_argument("prefill", help="the prefill engine's URL")
    parser.add_argument("control", help="IP:PORT where its rank 0 listens for other engines")
    parser.add_argument("decode", help="the decode engine's URL")
    parser.add_argument("prompt")
    options = parser.parse_args()
    name = secrets.token_hex(16)  # to know it is to be allowed to fetch: nobody may guess it
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    fetch = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": name,
        "remote_engine_id": f"prefill@{options.control}",
    }
    with ThreadPoolExecutor() as pool:
        first = pool.submit(complete, options.prefill, options.prompt, 1, asked)
        second = pool.submit(complete, options.decode, options.prompt, 16, fetch)
        first.result()
        answer = second.result()
    print(answer["choices"][0]["text"])
    print(json.dumps(answer["kv_transfer_params"]["stateferry"]["received"], indent=1))


if __name__ == "__main__":
    main()
