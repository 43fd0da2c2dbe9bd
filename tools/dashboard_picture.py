"""A picture of the dashboard: its own queries, answered by a real Prometheus over a real run, drawn here.

    python tools/dashboard_picture.py --record --prometheus PROGRAM   # engines for a minute and a half
    python tools/dashboard_picture.py > docs/images/dashboard.svg     # from the newest record, no engines

The run is a short soak: hand-offs with clients that leave and one fault in twenty reads, so that panels which
are flat on a good day show something. Prometheus scrapes both engines with the configuration and the alert
rules of `deploy/grafana`, every second in place of ten. Grafana is not needed: each panel is drawn from
the query, the legend and the unit that the dashboard gives it. Debian's package `prometheus` has the program.
"""

import argparse
import datetime
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import httpx
import yaml

from stateferry.bench.report.charts import Series, line_chart

ROOT = Path(__file__).resolve().parent.parent
GRAFANA = ROOT / "deploy" / "grafana"
RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 1.5
SCRAPE_S = 1
STEP_S = 2
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "10s"}
"""What Grafana would put in their place; the interval is for a scrape a second."""
READY_S = 30.0
DIGITS = 4
UNITS = {
    "ops": ("a second", 1.0),
    "Bps": ("MB a second", 1e-6),
    "s": ("seconds", 1.0),
    "percentunit": ("share", 1.0),
    "short": ("", 1.0),
}
"""Grafana's name of a unit -> ours, and what values are multiplied by."""
CHART_WIDTH, CHART_HEIGHT, TITLE = 640, 400, 40
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#333}.title{font-size:20px;font-weight:600}"
    ".row{font-size:26px;font-weight:600}.grid{stroke:#ddd;stroke-width:1}"
)


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels and rows, as Grafana reads them."""
    board: dict[str, Any] = json.loads((GRAFANA / "dashboard.json").read_text())
    return list(board["panels"])


# -- recording -----------------------------------------------------------------------------------


def configuration(ports: Mapping[str, int]) -> dict[str, Any]:
    """`deploy/grafana/prometheus.yaml` for engines on other ports, scraped more often."""
    found: dict[str, Any] = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())
    found["global"]["scrape_interval"] = f"{SCRAPE_S}s"
    found["global"]["evaluation_interval"] = f"{SCRAPE_S}s"
    found["rule_files"] = [str(GRAFANA / name) for name in found["rule_files"]]
    for job in found["scrape_configs"]:
        port = ports[job["job_name"]]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    return found


@contextmanager
def prometheus(program: str, ports: Mapping[str, int], folder: Path) -> Iterator[str]:
    """A real one that scrapes those ports; gives its address. Ended with the block."""
    from stateferry.stack.ports import HeldPort

    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(ports)))
    with HeldPort() as held:
        port = held.number
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    url = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + READY_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{program} does not start: {(folder / 'prometheus.log').read_text()[-2000:]}"
                )
            threading.Event().wait(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def record(program: str) -> dict[str, Any]:
    """Run the soak under Prometheus' eyes, and ask it what every panel asks."""
    from stateferry.gate.soak import Soak, start_engines
    from stateferry.stack import Client, Stack, commit, host_facts

    with Stack() as stack, Client(timeout_s=120.0) as client:
        prefill, decode = start_engines(stack)
        ports = {"stateferry-prefill": prefill.port, "stateferry-decode": decode.port}
        with prometheus(program, ports, stack.log_folder) as url:
            begin = time.time()
            report = Soak(client, prefill, decode, seed=7).run(MINUTES)
            end = time.time()
            answered = [answers(url, panel, begin, end) for panel in panels() if panel["type"] != "row"]
            rules = _get(f"{url}/api/v1/rules", {})["groups"]
            version = _get(f"{url}/api/v1/status/buildinfo", {})["version"]
    names = {f"127.0.0.1:{prefill.port}": "127.0.0.1:8100", f"127.0.0.1:{decode.port}": "127.0.0.1:8200"}
    text = json.dumps(answered)
    for (
        found,
        shown,
    ) in names.items():  # ports of a run are the system's choice; readers know the documented ones
        text = text.replace(found, shown)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "host": host_facts(),
        "prometheus": version,
        "minutes": MINUTES,
        "requests": report.requests,
        "wrong": report.wrong,
        "rules": sorted(rule["name"] for group in rules for rule in group["rules"] if rule["health"] == "ok"),
        "panels": json.loads(text),
    }


def answers(url: str, panel: Mapping[str, Any], begin: float, end: float) -> dict[str, Any]:
    """What Prometheus says to a panel's queries, over the whole run."""
    series = []
    for target in panel["targets"]:
        query = target["expr"]
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        asked = {"query": query, "start": begin, "end": end, "step": STEP_S}
        for found in _get(f"{url}/api/v1/query_range", asked)["result"]:
            points = [[round(at - begin, 1), _short(value)] for at, value in found["values"]]
            legend = legend_of(target["legendFormat"], found["metric"])
            series.append({"name": legend, "points": [p for p in points if p[1] is not None]})
    return {"title": panel["title"], "queries": [t["expr"] for t in panel["targets"]], "series": series}


def legend_of(form: str, labels: Mapping[str, str]) -> str:
    """`{{label}}` replaced, as Grafana does."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: labels.get(m[1], ""), form)


def _get(url: str, parameters: Mapping[str, Any]) -> Any:
    answer = httpx.get(url, params=dict(parameters), timeout=30.0, trust_env=False)
    answer.raise_for_status()
    return answer.json()["data"]


def _short(value: str) -> float | None:
    number = float(value)
    return None if math.isnan(number) else float(f"{number:.{DIGITS}g}")


# -- drawing -------------------------------------------------------------------------------------


def newest() -> dict[str, Any]:
    """The latest record."""
    found: dict[str, Any] = json.loads(max(RESULTS.glob("dashboard-*.json")).read_text())
    return found


def stale(recorded: Mapping[str, Any], board: Sequence[Mapping[str, Any]]) -> list[str]:
    """Panels whose queries are not those that were recorded."""
    asked = {panel["title"]: panel["queries"] for panel in recorded["panels"]}
    now = {p["title"]: [t["expr"] for t in p["targets"]] for p in board if p["type"] != "row"}
    return sorted(title for title in asked.keys() | now.keys() if asked.get(title) != now.get(title))


def picture(recorded: Mapping[str, Any], board: Sequence[Mapping[str, Any]]) -> str:
    """The dashboard as SVG: rows and panels where Grafana would put them."""
    found = {panel["title"]: panel for panel in recorded["panels"]}
    parts: list[str] = []
    top = 0
    for row in (p for p in board if p["type"] == "row"):
        parts.append(f'<text class="row" x="16" y="{top + 28}">{escape(row["title"])}</text>')
        y = row["gridPos"]["y"] + 1
        for panel in (p for p in board if p["type"] != "row" and p["gridPos"]["y"] == y):
            x = panel["gridPos"]["x"] // panel["gridPos"]["w"] * CHART_WIDTH
            parts.append(chart(panel, found[panel["title"]], x, top + TITLE))
        top += TITLE + CHART_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * CHART_WIDTH} {top}" width="100%">'
        f"<style>{STYLE}</style>"
        f'<rect width="{3 * CHART_WIDTH}" height="{top}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def chart(panel: Mapping[str, Any], recorded: Mapping[str, Any], x: int, y: int) -> str:
    """One panel at its place."""
    unit, scale = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    series = [
        Series(one["name"].replace("127.0.0.1", ""), [(at, value * scale) for at, value in one["points"]])
        for one in recorded["series"]
    ]
    drawn = line_chart(panel["title"], series, "seconds since the start", unit)
    if not drawn:
        return f'<text class="title" x="{x + 64}" y="{y + 18}">{escape(panel["title"])}: no data</text>'
    height = re.search(r'viewBox="0 0 \d+ (\d+)"', drawn)
    assert height is not None
    return drawn.replace("<svg ", f'<svg x="{x}" y="{y}" height="{height[1]}" ', 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="A picture of the dashboard.")
    parser.add_argument("--record", action="store_true", help="run engines and Prometheus first")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    options = parser.parse_args()
    if not options.record:
        sys.stdout.write(picture(newest(), panels()))
        return 0
    if shutil.which(options.prometheus) is None:
        print(f"{options.prometheus}: no such program. apt install prometheus", file=sys.stderr)
        return 2
    recorded = record(options.prometheus)
    path = RESULTS / f"dashboard-{recorded['date']}.json"
    path.write_text(json.dumps(recorded) + "\n")
    print(f"written: {path.relative_to(ROOT)}, {recorded['requests']} requests, wrong: {recorded['wrong']}")
    return 1 if recorded["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
