"""Ask a model behind a router, as any OpenAI client does, and show the answer as it comes.

    python examples/ask.py http://127.0.0.1:8000 "the hat is in Quito . Leo has the hat . where is Leo"

The router turns this one request into two: one to the prefill engine, one to the decode engine.
"""

import argparse
import json

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model behind a router.")
    parser.add_argument("url", help="the router's address")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="model")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    body = {"model": options.model, "prompt": options.prompt, "max_tokens": options.max_tokens}
    with httpx.stream(
        "POST", f"{options.url}/v1/completions", json=body | {"stream": True}, timeout=120.0
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            text = line.removeprefix("data: ")
            if text and text != "[DONE]":
                print(json.loads(text)["choices"][0]["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
