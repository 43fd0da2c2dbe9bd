"""The router of our Kubernetes manifest finds engines' pods and sends each leg to the right one.

The real vllm-router, with the manifest's own arguments, before a made-up Kubernetes API and made-up engines.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from stateferry.stack import AnswerError, Client, Server, Stack
from stateferry.stack.ports import HeldPort
from stateferry.testing.local_server import LocalServer

ROOT = Path(__file__).parents[2]
NAMESPACE = "stateferry"
PREFILL, DECODE, OTHER = "127.0.0.2", "127.0.0.3", "127.0.0.4"
OFFER = {"do_remote_prefill": True, "stateferry": {"transfer_id": "x", "ranks": [["h", 1, 2]]}}
TRIES, PAUSE_S = 200, 0.2
"""How often and how long the router is waited for to know both pods."""


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Be quiet."""

    def answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class FakeEngine(Answering):
    """Keeps what it is asked; answers as the prefill leg and as the decode leg."""

    asked: list[tuple[str, dict[str, Any]]]

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        address = str(self.server.server_address[0])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((address, body))
        choice = {"index": 0, "text": f" from {address}", "finish_reason": "length", "token_ids": [1]}
        self.answer({"id": "x", "choices": [choice], "kv_transfer_params": OFFER})


class FakeKubernetes(Answering):
    """Lists the pods; a watch stays open and says nothing."""

    pods: list[dict[str, Any]]
    over: threading.Event

    def do_GET(self) -> None:
        if "watch=" not in self.path:
            listed = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "5"}}
            self.answer(listed | {"items": self.pods})
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.over.wait(60.0)
        self.close_connection = True


def pod(address: str, labels: dict[str, str]) -> dict[str, Any]:
    name = address.replace(".", "-")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": name, "labels": labels},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def labels_of(role: str) -> dict[str, str]:
    """Of the pods of a deployment in our manifests."""
    name = "router" if role == "router" else "engines"
    for document in yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text()):
        if document["kind"] == "Deployment" and document["metadata"]["name"] == f"stateferry-{role}":
            labels: dict[str, str] = document["spec"]["template"]["metadata"]["labels"]
            return labels
    raise AssertionError(f"there is no deployment for {role}")


class ManifestRouter(Server):
    """vllm-router as the manifest starts it, but for ports and addresses of this machine."""

    def __init__(self, engine_port: int, kubeconfig: Path, log_path: Path) -> None:
        self._engine_port = engine_port
        self._kubeconfig = kubeconfig
        self._metrics = HeldPort()
        super().__init__("router", log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/router.yaml").read_text())
        (deployment,) = (d for d in documents if d["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        changes = {
            "--service-discovery-port": self._engine_port,
            "--service-discovery-namespace": NAMESPACE,
            "--host": "127.0.0.1",
            "--port": port,
            "--prometheus-host": "127.0.0.1",
            "--prometheus-port": self._metrics.number,
        }
        words = [*container["command"], *container["args"]]
        for name, value in changes.items():
            (index,) = (i for i, word in enumerate(words) if word.startswith(f"{name}="))
            words[index] = f"{name}={value}"
        words[0] = str(Path(sys.executable).with_name(words[0]))
        return words, os.environ | {"KUBECONFIG": str(self._kubeconfig)}

    def release_ports(self) -> None:
        self._metrics.close()
        super().release_ports()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[tuple[int, Path, list[tuple[str, dict[str, Any]]]]]:
    """Three pods behind an API: the engines' port, a kubeconfig, and what engines were asked."""
    asked: list[tuple[str, dict[str, Any]]] = []
    over = threading.Event()
    pods = [pod(PREFILL, labels_of("prefill")), pod(DECODE, labels_of("decode"))]
    pods.append(pod(OTHER, labels_of("router")))
    engine = type("Engine", (FakeEngine,), {"asked": asked})
    api = type("Api", (FakeKubernetes,), {"pods": pods, "over": over})
    with ExitStack() as stack:
        port = stack.enter_context(LocalServer(engine, PREFILL)).port
        for address in (DECODE, OTHER):
            stack.enter_context(LocalServer(engine, address, port))
        url = stack.enter_context(LocalServer(api)).url
        stack.callback(over.set)
        path = tmp_path / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": {"server": url}}],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                }
            )
        )
        yield port, path, asked


def test_the_manifests_router_finds_both_engines_and_sends_them_their_legs(
    kubernetes: tuple[int, Path, list[tuple[str, dict[str, Any]]]], tmp_path: Path
) -> None:
    port, kubeconfig, asked = kubernetes
    with Stack(tmp_path) as stack, Client(timeout_s=20.0) as client:
        router = ManifestRouter(port, kubeconfig, tmp_path / "router.log")
        stack.add(router)
        for _ in range(TRIES):
            try:
                answer = client.complete(router.url, "hello", 5)
                break
            except AnswerError:
                threading.Event().wait(PAUSE_S)
        else:
            raise AssertionError(f"the router never knew both engines:\n{router.log_tail(30)}")
    assert answer.text == f" from {DECODE}"
    (first, prefill), (second, decode) = asked[-2:]
    assert (first, second) == (PREFILL, DECODE)
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill["max_tokens"] == 1
    assert decode["kv_transfer_params"] == OFFER
    assert decode["max_tokens"] == 5
    assert OTHER not in {address for address, _ in asked}
