"""`stateferry inspect`: a model's cache and its hand-offs, from the config alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from stateferry.cli.layout_tables import show_groups, show_moves, show_pairs, show_pictures, show_tensors
from stateferry.cli.offline import offline_vllm
from stateferry.errors import ConfigError, LayoutError
from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import Survey, survey

DEFAULT_TOKENS = (128, 1024, 8192, 32768)
"""Prompt lengths that are shown unless others are asked for; those that fit the model."""
LOG_WIDTH = 140


def inspect(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Model folder; its weights are not needed.", show_default=False),
    ],
    tp: Annotated[
        list[int] | None,
        typer.Option(
            "--tp",
            min=1,
            help="Tensor-parallel size; several show every pair of them as prefill and decode engine.",
            show_default="1, or what --tensor-parallel-size says",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            min=1,
            help="Length of a prompt; may be repeated.",
            show_default=", ".join(map(str, DEFAULT_TOKENS)),
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", min=1, help="As vLLM's option.", show_default=False)
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; the rest to stderr.")
    ] = False,
) -> None:
    """Show a model's KV-cache groups, states and pages, and what a hand-off of it moves.

    Reads MODEL's config.json; loads no weights, starts no engine, takes seconds. vLLM itself makes the
    layout: what is shown is what an engine with these options hands out on this machine. Every other option
    goes to vLLM, as with `stateferry serve`.
    """
    arguments = [] if block_size is None else ["--block-size", str(block_size)]
    if model.startswith("-"):
        raise ConfigError(f"MODEL comes before vLLM's own options, found {model!r} in its place")
    if not Path(model, "config.json").is_file():
        raise ConfigError(
            f"MODEL must be a folder with a config.json, and {model!r} is none; nothing is downloaded"
        )
    sizes: list[int | None] = [*sorted(set(tp))] if tp else [None]
    with offline_vllm() as offline:
        engines = [offline.lay_out(["--model", model, *arguments, *context.args], size) for size in sizes]
    lengths = _lengths(tokens, engines[0].max_model_len)
    handoffs = [_handoff(p.layouts, d.layouts, lengths) for p in engines for d in engines]
    console = Console(stderr=json_output)
    if not console.is_terminal:
        console = Console(stderr=json_output, width=LOG_WIDTH)
    facts = engines[0].layouts[0].facts
    console.print(
        f"{engines[0].architecture} ({facts['model']}) on vLLM {facts['vllm_version']}, {facts['device']}: "
        f"up to {engines[0].max_model_len:,} tokens, {facts['dtype']}, KV cache {facts['kv_cache_dtype']}, "
        f"layout {facts['kv_cache_layout']}, {_state_mode(facts)}",
        highlight=False,
        markup=False,
    )
    for engine in engines:
        show_groups(console, engine.layouts[0])
        show_tensors(console, engine.layouts[0], engine.shapes)
        show_pictures(console, engine.layouts[0])
    surveys = [found for _, _, found in handoffs if isinstance(found, Survey)]
    if surveys:
        show_moves(console, surveys, engines[0].layouts[0])
        show_pairs(console, surveys, engines[0].layouts[0])
    for producer_size, consumer_size, found in handoffs:
        if isinstance(found, str):
            what = f"\nNo hand-off from {producer_size} to {consumer_size} rank(s): {found}"
            console.print(what, highlight=False, markup=False)
    if json_output:
        print(json.dumps(_as_json(engines, handoffs)))


def _lengths(tokens: Sequence[int] | None, longest: int) -> list[int]:
    if tokens is None:
        return [length for length in DEFAULT_TOKENS if length <= longest] or [longest]
    too_long = [length for length in tokens if length > longest]
    if too_long:
        raise ConfigError(
            f"--tokens {too_long[0]}: this model takes prompts of at most {longest} tokens; ask for less or "
            "raise vLLM's --max-model-len"
        )
    return sorted(set(tokens))


Handoff = tuple[int, int, Survey | str]
"""Tensor-parallel size of the prefill and of the decode engine; the survey, or why there can be none."""


def _handoff(
    producers: Sequence[CacheLayout], consumers: Sequence[CacheLayout], lengths: Sequence[int]
) -> Handoff:
    try:
        found: Survey | str = survey(producers, consumers, lengths)
    except LayoutError as e:
        found = str(e)
    return len(producers), len(consumers), found


def _state_mode(facts: dict[str, str]) -> str:
    mode = facts.get("mamba_cache_mode")
    if mode is None:
        return "no recurrent state"
    kept = {"none": "one state a request", "align": "a state per block"}.get(mode, mode)
    return f"{kept} ({mode})"


def _as_json(engines: Sequence[Any], handoffs: Sequence[Handoff]) -> dict[str, Any]:
    return {
        "model": engines[0].model,
        "architecture": engines[0].architecture,
        "max_model_len": engines[0].max_model_len,
        "engines": [
            {
                "tp": len(engine.layouts),
                "shapes": engine.shapes,
                "layouts": msgspec.to_builtins(engine.layouts),
            }
            for engine in engines
        ],
        "handoffs": [
            {"producer_tp": p, "consumer_tp": d, "refused": found}
            if isinstance(found, str)
            else {"producer_tp": p, "consumer_tp": d, "refused": None, **survey_json(found)}
            for p, d, found in handoffs
        ],
    }


def survey_json(found: Survey) -> dict[str, Any]:
    """A survey's lengths and pairs as JSON values."""
    return {
        "lengths": [msgspec.to_builtins(length) for length in found.lengths],
        "pairs": [msgspec.to_builtins(pair) for pair in found.pairs],
    }
