"""Asking a running engine how its cache looks, over the completion API that it serves anyway."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from stateferry.errors import ProtocolError
from stateferry.layout.fingerprint import decode_layout
from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import check_ranks
from stateferry.stack import Client
from stateferry.wire import DESCRIBE_PARAMS, RankAddress, authority, engine_place, parse_description

PROMPT = "a"
TIMEOUT_S = 60.0
"""A busy engine may take long to come to a prompt."""
MODELS_S = 10.0
"""Its HTTP server has the list at hand: whoever does not give it by then hangs."""
QUERY_S = 5.0
"""As long as llm-d's sidecar waits."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine said of itself. Parallel tuples, by tensor-parallel rank."""

    layouts: tuple[CacheLayout, ...]
    ranks: tuple[RankAddress, ...]
    kv_role: str = ""
    """vLLM's name of what the engine does in a hand-off; empty where an older one does not say."""
    bootstrap_port: int = 0
    """Where it answers routers that send both legs at once; 0: nowhere."""


def ask_engine(url: str, timeout_s: float = TIMEOUT_S) -> EngineAnswer:
    """Ask the engine behind `url` for its layouts with a prompt of a token or two.

    Raises AnswerError when it does not answer, ProtocolError or LayoutError when it answers something else.
    """
    url = url.rstrip("/")
    with Client(min(timeout_s, MODELS_S)) as client:
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
    return EngineAnswer(layouts, description.ranks, description.kv_role, description.bootstrap_port)


def query_url(url: str, bootstrap_port: int) -> str:
    """Where a router that knows a prefill engine by `url` asks before it sends both legs at once."""
    return f"http://{authority(urlsplit(url).hostname or '', bootstrap_port)}/query"


def why_not_told(query: str, ranks: Sequence[RankAddress], timeout_s: float = QUERY_S) -> str:
    """Why such a router does not hear of this engine at `query`; empty where it does.

    `ranks`: where the engine itself says that it listens.
    """
    cure = "Routers that send both legs at once ask there; others do not need it"
    try:
        answer = httpx.get(query, timeout=timeout_s, trust_env=False)
        told = answer.raise_for_status().json()
        places = {entry["engine_id"].rpartition("@")[2] for entry in told.values()}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError, TypeError, KeyError) as e:
        return f"{query} does not answer as it should ({type(e).__name__}: {e}). {cure}."
    first = engine_place("", ranks[0]).removeprefix("@")
    return (
        ""
        if first in places
        else f"{query} names {', '.join(sorted(places)) or 'no engine'}, and the engine listens on {first}: "
        f"somebody else answers there. {cure}."
    )


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
