"""Deploy files against the schemas of who reads them. Run by `make docs`, with packages of its own."""

import json
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.30"
"""The oldest Kubernetes that the manifests are for."""
NEWEST = kubernetes_validate.latest_version()
PIECES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}
"""What Grafana puts in place of its variables."""


def manifests() -> Iterator[dict[str, Any]]:
    folder = DEPLOY / "kubernetes"
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        yield from (d for d in yaml.safe_load_all((folder / name).read_text()) if d)


@pytest.mark.parametrize("version", [KUBERNETES, NEWEST])
@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_kubernetes_takes_the_manifest(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_manifest_that_kubernetes_would_refuse_is_noticed() -> None:
    manifest = next(m for m in manifests() if m["kind"] == "Deployment")
    manifest["spec"]["template"]["spec"]["containers"][0]["port"] = 8000
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def compose() -> tuple[Any, Any]:
    """The compose file and the schema of the Compose specification."""
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    return yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text()), json.loads(schema.read_text())


def test_compose_takes_the_file() -> None:
    jsonschema.validate(*compose())


def test_a_compose_file_that_would_be_refused_is_noticed() -> None:
    file, schema = compose()
    file["services"]["decode"]["comand"] = "serve decode"
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(file, schema)


def queries() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    rules = yaml.safe_load((DEPLOY / "grafana/alerts.yaml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


def read(query: str) -> promql_parser.Expr:
    for piece, value in PIECES.items():
        query = query.replace(piece, value)
    return promql_parser.parse(query)


def test_every_query_is_promql() -> None:
    found = [read(query) for query in queries()]
    assert len(found) > 20


@pytest.mark.parametrize("query", ["sum by (x) rate(a[5m])", "rate(a)", 'a{b="c"', "a > > b"])
def test_a_query_that_prometheus_would_refuse_is_noticed(query: str) -> None:
    with pytest.raises(ValueError):
        read(query)


def test_the_site_has_a_page_for_every_page_and_names_no_other_host() -> None:
    """What a reader's browser loads comes with the site: it works where there is no internet."""
    built = ROOT / "site"
    if not built.is_dir():
        subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        html = built / ("index.html" if str(page) == "index" else f"{page}/index.html")
        text = html.read_text()
        assert "<h1" in text, page
        for loaded in ('<script src="http', '<img src="http', 'rel="stylesheet" href="http'):
            assert loaded not in text, f"{page}: {loaded}"
