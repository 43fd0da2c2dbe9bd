"""Names of metrics and spans: complete, bounded, and written down."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from stateferry.ferry.link import LinkState
from stateferry.layout import fingerprint
from stateferry.layout.spec import GroupKind
from stateferry.session import Cause, Outcome
from stateferry.telemetry import METRICS, OTHER_FIELD, SPANS, MetricKind, Tally, exemplar_of, refusal_label
from stateferry.telemetry.names import EXEMPLAR_ROOM

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("stateferry_handoffs", [outcome.value for outcome in Outcome]),
        ("stateferry_failures", [cause.value for cause in Cause if cause is not Cause.NONE]),
        ("stateferry_received_bytes", [kind.value for kind in GroupKind]),
        ("stateferry_received_pieces", [kind.value for kind in GroupKind]),
        ("stateferry_peers", [state.value for state in LinkState]),
    ],
)
def test_every_value_that_the_code_can_count_is_served_from_the_start(metric: str, values: list[str]) -> None:
    assert sorted(METRICS[metric].values) == sorted(values)


def compared_fields() -> set[str]:
    """Every field that two layouts are compared by, as `compare` names it, and every fact of an engine."""
    fields = set()
    for node in ast.walk(ast.parse(inspect.getsource(fingerprint))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_equal", "_differ"):
            if isinstance(node.args[0], ast.Name):
                continue  # passed on
            text = ast.unparse(node.args[0]).removeprefix("f").strip("'\"")
            fields.add(re.sub(r"\{depth\}", "0", re.sub(r"^\{\w+\}", "groups[3]", text)))
    facts = ast.parse((ROOT / "src/stateferry/vllm/kv_facts.py").read_text())
    for node in ast.walk(facts):
        if isinstance(node, ast.Dict) and len(node.keys) > 5:
            fields |= {f"facts.{key.value}" for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "facts":
            assert isinstance(node.slice, ast.Constant)
            fields.add(f"facts.{node.slice.value}")
    return {field for field in fields if "{" not in field}


def test_every_field_that_engines_are_compared_by_has_a_label_of_its_own() -> None:
    fields = compared_fields()
    assert {"groups[3].block_tokens", "facts.model", "facts.conv_layout", "groups.count"} <= fields
    assert [field for field in sorted(fields) if refusal_label(field) == OTHER_FIELD] == []


def test_a_field_that_a_peer_made_up_is_counted_with_others() -> None:
    for field in ("facts." + "x" * 9000, "facts.model.x", "", "groups[1].surprise", "\n"):
        assert refusal_label(field) == OTHER_FIELD


def test_two_kinds_of_one_field_are_told_apart() -> None:
    assert refusal_label("groups[0].layers.1.mixer.kv.dtype") == "dtype"
    assert refusal_label("facts.dtype") == "facts.dtype"
    assert refusal_label("facts.hf_config.text_config.rope_theta") == "facts.hf_config"
    assert (
        refusal_label("groups[0].a.b.loops[2].count") == refusal_label("groups[0].a.b.loops.count") == "loops"
    )


@pytest.mark.parametrize("reason", ["", "short", "ä" * 500, "x" * 110])
def test_an_exemplar_is_never_longer_than_prometheus_takes(reason: str) -> None:
    labels = exemplar_of(outcome="failed", trace_id="0" * 32, request="r" * 45, reason=reason)
    assert sum(len(name) + len(value) for name, value in labels.items()) <= EXEMPLAR_ROOM
    assert labels["request"] == "r" * 45
    assert ("reason" in labels) == bool(reason)
    assert reason.startswith(labels.get("reason", "").removesuffix("…"))


def test_a_reason_that_does_not_fit_ends_with_a_whole_word_and_a_mark() -> None:
    """Symptom: `top` showed a reason that ended in the middle of a word, as if that were all of it."""
    reason = " ".join(["peer"] * 40)
    shown = exemplar_of(request="r" * 40, reason=reason)["reason"]
    assert shown.endswith("peer…")
    assert exemplar_of(reason="all of it")["reason"] == "all of it"


def test_a_tally_that_is_looked_at_does_not_change_any_more() -> None:
    tally = Tally()
    tally.add("m", "a")
    before = tally.counts()
    tally.add("m", "a", 2)
    tally.add("m", "b")
    assert before == {("m", "a"): 1}
    assert tally.counts() == {("m", "a"): 3, ("m", "b"): 1}


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    command = [sys.executable, ROOT / "tools" / "metrics_table.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == made.stdout
    for metric in METRICS.values():
        assert page.count(f"| `{metric.series}` | {metric.kind.value} |") == 1


def test_the_page_of_spans_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "tracing.md").read_text()
    rows = dict(re.findall(r"^\| `(stateferry\.\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert rows == SPANS


def test_every_query_of_the_page_names_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Questions")[2]
    asked = set(re.findall(r"\bstateferry_\w+", page))
    served = {m.series for m in METRICS.values()}
    for metric in METRICS.values():
        if metric.kind is MetricKind.HISTOGRAM:
            served |= {f"{metric.name}_{end}" for end in ("bucket", "sum", "count")}
    assert asked
    assert asked <= served


@pytest.mark.parametrize("page", ["README.md", "docs/metrics.md"])
def test_the_grep_that_pages_show_prints_our_series_and_none_of_their_birthdays(page: str) -> None:
    """Symptom: `_created` lines drowned the answer."""
    registry = CollectorRegistry()
    labels = ["engine", "model_name"]
    for metric in METRICS.values():
        if metric.kind is MetricKind.COUNTER:
            Counter(metric.name, "-", labels, registry=registry).labels("0", "m").inc()
        elif metric.kind is MetricKind.HISTOGRAM:
            Histogram(metric.name, "-", labels, buckets=metric.buckets, registry=registry).labels("0", "m")
    Counter("vllm:request_success", "-", labels, registry=registry).labels("0", "m")
    served = generate_latest(registry).decode()
    ours = [line for line in served.splitlines() if line.startswith("stateferry_")]
    assert any("_created" in line for line in ours), "there is nothing to leave out"
    (pipe,) = re.findall(
        r"^curl -s http://127.0.0.1:8200/metrics \| (grep '.*_created.*)$", text_of(page), re.M
    )
    shown = subprocess.run(["bash", "-c", pipe], input=served, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == [line for line in ours if "_created" not in line]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()
