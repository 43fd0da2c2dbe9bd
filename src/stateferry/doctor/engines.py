"""Asking a running engine how its cache looks, over the completion API that it serves anyway."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from stateferry.errors import ProtocolError
from stateferry.layout.fingerprint import decode_layout
from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import check_ranks
from stateferry.stack import Client
from stateferry.wire import DESCRIBE_PARAMS, RankAddress, parse_description

PROMPT = "a"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine said of itself. Parallel tuples, by tensor-parallel rank."""

    layouts: tuple[CacheLayout, ...]
    ranks: tuple[RankAddress, ...]
    kv_role: str = ""
    """vLLM's name of what the engine does in a hand-off; empty where an older one does not say."""


def ask_engine(url: str, timeout_s: float = TIMEOUT_S) -> EngineAnswer:
    """Ask the engine behind `url` for its layouts with a prompt of a token or two.

    Raises AnswerError when it does not answer, ProtocolError or LayoutError when it answers something else.
    """
    url = url.rstrip("/")
    with Client(timeout_s) as client:
        models = client.models(url)
    if not models:
        raise ProtocolError(f"{url} serves no model")
    with Client(timeout_s, models[0]) as client:
        answer = client.complete(url, PROMPT, 1, kv_transfer_params=DESCRIBE_PARAMS)
    try:
        description = parse_description(answer.kv_transfer_params)
        layouts = tuple(decode_layout(layout) for layout in description.layouts)
    except ProtocolError as e:
        raise ProtocolError(f"{url}: {e}") from e
    check_ranks(layouts)
    return EngineAnswer(layouts, description.ranks, description.kv_role)


def far_from_loopback(prefill_url: str, decode_url: str, ranks: Sequence[RankAddress]) -> str:
    """Why the decode engine may not reach these ranks of the prefill engine; empty where nothing is odd.

    The engines look to be on two machines, yet the ranks listen where only their own can dial.
    """
    local = [rank for rank in ranks if _is_loopback(rank.host)]
    hosts = {
        host for url in (prefill_url, decode_url) if not _is_loopback(host := urlsplit(url).hostname or "")
    }
    if not local or not hosts or urlsplit(prefill_url).hostname == urlsplit(decode_url).hostname:
        return ""
    return (
        f"The prefill engine listens on {local[0].host}, which only its own machine can dial; if the decode "
        "engine is on another, start the prefill engine with --kv-host ADDRESS and a key (`stateferry key`)."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
