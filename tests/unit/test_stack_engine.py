"""The command lines and environments of engines and routers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stateferry.errors import EngineError
from stateferry.stack import NIXL, STATEFERRY_MODULE, EngineSpec, Role, Router


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_an_engine_is_vllms_server_with_our_connector() -> None:
    spec = EngineSpec(model=Path("m"), role=Role.PREFILL, extra_config={"lease_s": 3}, args=("--seed", "1"))
    command = spec.command(8100)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert option(command, "--model") == "m"
    assert option(command, "--port") == "8100"
    assert option(command, "--host") == "127.0.0.1"
    assert "--enable-prefix-caching" in command
    assert "--enforce-eager" in command
    assert command[-2:] == ["--seed", "1"]
    assert json.loads(option(command, "--kv-transfer-config")) == {
        "kv_connector": "StateFerryConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lease_s": 3, "host": "127.0.0.1"},
    }


def test_everything_about_an_engine_can_be_chosen() -> None:
    spec = EngineSpec(
        model="m",
        role=Role.DECODE,
        name="second",
        connector_module=STATEFERRY_MODULE,
        extra_config={"host": "10.0.0.1"},
        load_failure_policy="fail",
        served_model_name="served",
        tp_size=2,
        prefix_caching=False,
        enforce_eager=False,
        max_model_len=512,
    )
    command = spec.command(1)
    config = json.loads(option(command, "--kv-transfer-config"))
    assert spec.label == "second"
    assert option(command, "--served-model-name") == "served"
    assert option(command, "--tensor-parallel-size") == "2"
    assert option(command, "--max-model-len") == "512"
    assert "--no-enable-prefix-caching" in command
    assert "--enforce-eager" not in command
    assert config["kv_connector_module_path"] == "stateferry.vllm.connector"
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_connector_extra_config"] == {"host": "10.0.0.1"}


def test_a_plain_engine_has_no_connector() -> None:
    assert "--kv-transfer-config" not in EngineSpec(model="m", connector=None).command(1)


def test_another_connector_is_given_no_setting_of_ours() -> None:
    config = EngineSpec(model="m", connector=NIXL).kv_transfer_config()
    assert config is not None
    assert config["kv_connector_extra_config"] == {}


def test_the_environment_suits_a_small_machine_and_can_be_overridden(monkeypatch: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    env = EngineSpec(model="m", cache_gib=2, env={"HF_HUB_OFFLINE": "0"}).environment()
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["HF_HUB_OFFLINE"] == "0"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in env
    assert EngineSpec(model="m").environment(5)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5"
    assert EngineSpec(model="m", development_mode=False).environment()["VLLM_SERVER_DEV_MODE"] == "0"


def test_a_missing_router_is_named_with_the_cure(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EngineError, match="pip install vllm-router"):
        Router(["http://p"], ["http://d"], tmp_path / "router.log")
