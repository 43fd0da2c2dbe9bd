"""Deploy files: they load, their parts fit each other, and their commands are ones that we have.

`tests/site` holds them against the schemas of Kubernetes and Compose.
"""

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.documented import ROOT, refused, router_refuses, vllm_options

from stateferry.ferry.keys import write_key

DEPLOY = ROOT / "deploy"
MARKED = ("CPU", "NVIDIA", "AMD RDMA")
ENGINES = ("prefill", "decode")
KEY = re.compile(r"/(?:run/secrets|etc/stateferry)/control\.key")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "control.key"
    write_key(path)
    return path


def documents(name: str) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all((DEPLOY / name).read_text()) if d]


def kubernetes() -> list[dict[str, Any]]:
    names = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    return [document for name in names for document in documents(f"kubernetes/{name}")]


def systemd(name: str, section: str, option: str) -> str:
    parser = ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string((DEPLOY / "systemd" / name).read_text())
    return parser[section][option]


def environment(name: str) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def systemd_command(name: str, settings: dict[str, str]) -> list[str]:
    """As systemd makes it: `${X}` is one word, `$X` is split."""
    words = []
    for word in systemd(name, "Service", "ExecStart").split():
        if word.startswith("$") and word[1:] in settings:
            words += settings[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: settings[found[1]], word))
    return [Path(words[0]).name, *words[1:]]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command that a deploy file runs, with where it stands."""
    for role in ENGINES:
        yield f"systemd {role}", systemd_command(f"stateferry-{role}.service", environment("engine.env"))
    yield "systemd router", systemd_command("stateferry-router.service", environment("router.env"))
    services = documents("compose/compose.yaml")[0]["services"]
    for name, service in services.items():
        start = service.get("entrypoint", ["stateferry"])
        yield f"compose {name}", [*start, *shlex.split(service["command"])]
    for document in kubernetes():
        for container in containers(document):
            yield (
                f"kubernetes {container['name']}",
                [*container.get("command", ["stateferry"]), *container["args"]],
            )
    values = documents("llm-d/values.yaml")[0]
    for role in ENGINES:
        (container,) = values[role]["containers"]
        yield f"llm-d {role}", [*container["command"], *container["args"]]


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] != "Deployment":
        return []
    found: list[dict[str, Any]] = document["spec"]["template"]["spec"]["containers"]
    return found


def usable(words: list[str], key: Path) -> list[str]:
    """As the container would see it: the pod's address and the mounted key."""
    return [
        KEY.sub(str(key), word).replace("$(POD_IP)", "10.0.0.7").replace("$(NAMESPACE)", "x")
        for word in words
    ]


def problem(words: list[str]) -> str:
    return router_refuses(words) if words[0] == "vllm-router" else refused(words)


def test_every_command_is_one_that_we_have(key: Path) -> None:
    found = list(commands())
    assert len(found) == 3 + 3 + 3 + 2
    assert {where: text for where, words in found if (text := problem(usable(words, key)))} == {}


def test_every_engine_gets_settings_that_it_takes(key: Path) -> None:
    """`serve … --dry-run` reads all of them, the key included, and refuses what an engine would refuse."""
    serving = [(where, words) for where, words in commands() if words[1:2] == ["serve"]]
    assert len(serving) == 8
    for where, words in serving:
        assert "--model" in vllm_options(usable(words, key)), where


def test_llm_ds_other_connector_needs_the_lines_that_say_so(key: Path) -> None:
    text = (DEPLOY / "llm-d/values.yaml").read_text()
    taken_in = re.sub(r"# (- .*) # \[at once\]", r"\1", text)
    values = yaml.safe_load(taken_in)
    (container,) = values["prefill"]["containers"]
    options = vllm_options(usable([*container["command"], *container["args"]], key))
    config = json.loads(options[options.index("--kv-transfer-config") + 1])
    port = config["kv_connector_extra_config"]["bootstrap_port"]
    assert {"name": "bootstrap", "containerPort": port, "protocol": "TCP"} in container["ports"]
    assert values["decode"] == yaml.safe_load(text)["decode"]
    assert f"port {port} unless told otherwise" in text


def test_a_command_without_its_key_is_refused(key: Path) -> None:
    """The mutant: an address that others reach, and no key."""
    words = next(words for where, words in commands() if where == "kubernetes engine")
    bare = [word for word in usable(words, key) if not word.startswith("--auth-key-file")]
    with pytest.raises(AssertionError, match="answer everybody"):
        vllm_options(bare)


@pytest.mark.parametrize(
    "name", ["systemd/engine.env", "compose/compose.yaml", "kubernetes/engines.yaml", "llm-d/values.yaml"]
)
def test_every_file_says_which_lines_to_change_for_which_device(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert [mark for mark in MARKED if mark not in text] == []


AMD_TRANSPORT = {
    "containers/Dockerfile": 'LIBRARIES="amd-mori ',
    "kubernetes/engines.yaml": "- --transport=nixl # [AMD RDMA] mori",
    "llm-d/values.yaml": "- --transport=nixl # [AMD RDMA] mori",
    "compose/compose.yaml": "[AMD RDMA]  an image for ROCm; `--transport mori`;",
    "systemd/engine.env": "#ENGINE_ARGS=--max-model-len 8192 --gpu-memory-utilization 0.9 --transport mori",
}


@pytest.mark.parametrize("name", AMD_TRANSPORT)
def test_engines_for_amd_use_the_transport_that_their_image_has(name: str) -> None:
    """Symptom: the image had MoRI, and the engines in it were to use NIXL, which it lacks."""
    text = (DEPLOY / name).read_text()
    assert AMD_TRANSPORT[name] in text
    assert "UCX_" not in text, "NIXL's network card"


def misfits(objects: list[dict[str, Any]]) -> list[str]:
    """What does not fit together in a set of Kubernetes objects; empty: nothing."""
    found = []
    pods = [d["spec"]["template"] for d in objects if d["kind"] == "Deployment"]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for document in objects:
        name, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        if document["kind"] == "Deployment":
            if not _selects(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]):
                found.append(f"{name} does not select its own pods")
            pod = spec["template"]["spec"]
            (container,) = pod["containers"]
            ports = {port["name"] for port in container["ports"]}
            probes = [container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")]
            found += [f"{name} lacks a probe" for probe in probes if probe is None]
            found += [
                f"{name} probes no port of its" for p in probes if p and p["httpGet"]["port"] not in ports
            ]
            volumes = {volume["name"] for volume in pod.get("volumes", ())}
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            found += [f"{name} mounts {volumes ^ mounts}, or does not"] if volumes != mounts else []
        elif document["kind"] == "Service":
            chosen = [pod for pod, own in zip(pods, labels, strict=True) if _selects(spec["selector"], own)]
            if len(chosen) != 1:
                found.append(f"{name} selects {len(chosen)} deployments")
            names = {p["name"] for pod in chosen for c in pod["spec"]["containers"] for p in c["ports"]}
            found += [
                f"{name}: no port {p['targetPort']}" for p in spec["ports"] if p["targetPort"] not in names
            ]
    return found


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_kubernetes_objects_fit_each_other() -> None:
    assert misfits(kubernetes()) == []


def test_objects_that_do_not_fit_are_noticed() -> None:
    def damaged(kind: str, path: str, value: Any) -> list[str]:
        objects = copy.deepcopy(kubernetes())
        place = next(d for d in objects if d["kind"] == kind)
        *way, last = path.split(".")
        for step in way:
            place = place[int(step)] if step.isdigit() else place[step]
        place[last] = value
        return misfits(objects)

    assert damaged("Deployment", "spec.selector.matchLabels", {"stateferry/role": "cook"})
    assert damaged("Deployment", "spec.template.spec.containers.0.readinessProbe", None)
    assert damaged("Deployment", "spec.template.spec.volumes", [])
    assert damaged("Service", "spec.selector", {"app.kubernetes.io/name": "stateferry"})
    assert damaged("Service", "spec.ports", [{"targetPort": "grpc"}])


def test_the_router_looks_for_the_engines_pods() -> None:
    router = next(words for where, words in commands() if where == "kubernetes router")
    for role in ENGINES:
        at = router.index(f"--{role}-selector")
        wanted = dict(word.split("=") for word in router[at + 1 : at + 3])
        pods = [
            d
            for d in kubernetes()
            if d["metadata"]["name"] == f"stateferry-{role}" and d["kind"] == "Deployment"
        ]
        assert [_selects(wanted, pod["spec"]["template"]["metadata"]["labels"]) for pod in pods] == [True]


def test_only_router_prometheus_and_engines_reach_an_engine() -> None:
    (policy,) = documents("kubernetes/network-policy.yaml")
    engines, others = policy["spec"]["ingress"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["podSelector"] == engines["from"][0]["podSelector"]
    assert "ports" not in engines, "NIXL picks ports of its own"
    assert [port["port"] for port in others["ports"]] == ["http"]


def test_the_secret_is_mounted_so_that_the_engine_accepts_it() -> None:
    secrets = [
        volume["secret"]
        for document in kubernetes()
        if document["kind"] == "Deployment"
        for volume in document["spec"]["template"]["spec"].get("volumes", ())
        if "secret" in volume
    ]
    made = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["secretGenerator"]
    assert {secret["secretName"] for secret in secrets} == {entry["name"] for entry in made}
    assert all(secret["defaultMode"] & 0o037 == 0 for secret in secrets)


def test_compose_services_use_what_is_there() -> None:
    (compose,) = documents("compose/compose.yaml")
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"]), name
    for role in ENGINES:
        assert f"--kv-host {role}" in services[role]["command"], "a container's own name is what peers dial"


def test_both_systemd_engines_differ_in_their_role_only() -> None:
    prefill, decode = ((DEPLOY / f"systemd/stateferry-{role}.service").read_text() for role in ENGINES)
    as_decode = prefill.replace("prefill", "decode").replace("reads prompts", "writes answers")
    assert as_decode == decode


def verified(unit: str, folder: Path) -> str:
    """What `systemd-analyze verify` says about a unit whose programs exist."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("stateferry", "vllm-router"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    path = folder / "stateferry-test.service"
    path.write_text(unit.replace("/opt/stateferry/bin", str(programs)))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    return "\n".join(line for line in result.stderr.splitlines() if path.name in line)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", [*ENGINES, "router"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    unit = (DEPLOY / f"systemd/stateferry-{name}.service").read_text()
    assert verified(unit, tmp_path) == ""
    assert verified(unit.replace("Restart=on-failure", "Restart=when-tired"), tmp_path) != ""
