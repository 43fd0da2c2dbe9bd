"""Asking engines for their pages, and a router for its engines."""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import httpx

from stateferry.errors import EngineError
from stateferry.watch.figures import Figures, figures_of
from stateferry.watch.page import Snapshot, read_page

OPENMETRICS = "application/openmetrics-text"
PAGES = ("/metrics/", "/metrics")
"""vLLM answers the first one in the format that was asked for, with examples; others may not have it."""
MAX_ENGINES = 256
WORKER_LISTS = ("/workers", "/list_workers")
"""vllm-router's; the second one is also older ones'."""


@dataclass(frozen=True, slots=True)
class Found:
    """An engine to look at."""

    url: str
    role: str = ""
    """What its router uses it for; empty: not known."""


def discover(router_url: str, timeout_s: float = 5.0) -> list[Found]:
    """The engines behind a vllm-router. Raises EngineError where it does not say."""
    url = router_url.rstrip("/")
    said = "nothing"
    for path in WORKER_LISTS:
        try:
            answer = httpx.get(url + path, timeout=timeout_s, trust_env=False)
            if answer.status_code == 200:
                return _engines(answer.json())
            said = f"HTTP {answer.status_code} at {path}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as e:
            said = f"{type(e).__name__} at {path}: {e}"
    raise EngineError(
        f"{url} does not say which engines it has ({said}). It should be a vllm-router; for another one, "
        "give the engines' URLs"
    )


def _engines(answer: Any) -> list[Found]:
    workers = answer["workers"] if "workers" in answer else [{"url": u} for u in answer["urls"]]
    roles = {"prefill": "prefill", "decode": "decode"}
    # A data-parallel rank is `URL@rank`; the ranks share a page.
    found = {
        re.sub(r"@\d+$", "", str(w["url"])).rstrip("/"): roles.get(w.get("worker_type"), "") for w in workers
    }
    engines = [Found(url, role) for url, role in list(found.items())[:MAX_ENGINES]]
    return sorted(engines, key=lambda engine: (engine.role != "prefill", engine.url))


class Engines:
    """Engines that are looked at again and again. One thread."""

    def __init__(self, engines: Sequence[Found], timeout_s: float = 5.0) -> None:
        self.engines = list(engines)
        self._http = httpx.Client(timeout=timeout_s, trust_env=False, follow_redirects=True)
        self._pool = ThreadPoolExecutor(max_workers=min(16, max(1, len(engines))))
        self._before: dict[tuple[str, str], Snapshot] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def look(self, now_s: float) -> tuple[list[Figures], dict[str, str]]:
        """Figures of every engine that answers, and why the others do not, by URL."""
        pages = self._pool.map(lambda engine: self._page(engine, now_s), self.engines)
        figures, silent = [], {}
        for engine, page in zip(self.engines, pages, strict=True):
            if isinstance(page, str):
                silent[engine.url] = page
                continue
            for snapshot in page:
                key = (snapshot.url, snapshot.engine)
                figures.append(figures_of(snapshot, self._before.get(key), engine.role))
                self._before[key] = snapshot
        return figures, silent

    def _page(self, engine: Found, now_s: float) -> list[Snapshot] | str:
        """One engine's page, or why there is none."""
        said = ""
        for path in PAGES:
            try:
                answer = self._http.get(engine.url + path, headers={"Accept": OPENMETRICS})
                if answer.status_code != 200:
                    said = f"HTTP {answer.status_code} at {path}"
                    continue
                openmetrics = answer.headers.get("content-type", "").startswith(OPENMETRICS)
                page = read_page(answer.text, engine.url, now_s, openmetrics, _date(answer))
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
                said = f"{type(e).__name__}: {e}"
                continue
            if any(snapshot.ours for snapshot in page):
                return page
            said = "it serves no metrics of StateFerry: another server, or an engine without the connector"
        return said


def _date(answer: httpx.Response) -> float:
    """When an answer was made, by the clock of the machine that made it; ours where it does not say."""
    try:
        return parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return time.time()
