"""Settings: defaults, bounds, and errors that name the key."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stateferry.config import Config, TransportName, Verify, control_port, parse_config
from stateferry.errors import ConfigError


def test_nothing_set_is_the_defaults() -> None:
    assert parse_config({}) == Config()
    assert Config().lease_s == 15.0
    assert not Config().testing


def test_values_may_be_text_as_some_launchers_pass_them() -> None:
    config = parse_config(
        {"lease_s": "2.5", "port": "7000", "testing": "true", "transport": "nixl", "verify": "all"}
    )
    assert config == Config(
        lease_s=2.5, port=7000, testing=True, transport=TransportName.NIXL, verify=Verify.ALL
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_s", 0),
        ("lease_s", -1),
        ("lease_s", "soon"),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("lease_s", 1e9),
        ("port", 70000),
        ("port", -1),
        ("bootstrap_port", 65536),
        ("transport", "carrier-pigeon"),
        ("verify", "some"),
        ("testing", "perhaps"),
        ("host", 5),
        ("nixl_backends", "UCX"),
        ("transfer_timeout_s", None),
        ("mori_backend", "tcp"),
        ("mori_qp_per_transfer", 0),
        ("mori_post_batch_size", -2),
        ("mori_quiet_s", -1),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as e:
        parse_config({key: value})
    assert key in str(e.value)
    assert repr(value) in str(e.value)


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'leese_s'.*lease_s"):
        parse_config({"leese_s": 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transport": "faults"}, "set 'testing'"),
        ({"transport": "cma", "testing": True, "faults": {"seed": 1}}, "nothing would obey it"),
    ],
)
def test_faults_are_for_engines_under_test(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(settings)


def test_routers_that_keep_an_answer_need_an_address_that_stays() -> None:
    assert parse_config({"port": 5600, "bootstrap_port": "8998"}).bootstrap_port == 8998
    with pytest.raises(ConfigError, match=r"'bootstrap_port' = 8998, but 'port' is 0.*restarts.*Set 'port'"):
        parse_config({"bootstrap_port": 8998})


def test_the_page_of_settings_is_what_the_code_says() -> None:
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, root / "tools" / "configuration_table.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (root / "docs" / "configuration.md").read_text() == made.stdout


def test_every_rank_of_every_data_parallel_engine_has_a_port_of_its_own() -> None:
    ports = [control_port(20000, engine, 8, rank) for engine in range(4) for rank in range(8)]
    assert len(set(ports)) == 32
    assert {control_port(0, engine, 8, 3) for engine in range(4)} == {0}
    with pytest.raises(ConfigError, match=r"'port' = 65530.*choose a smaller one"):
        control_port(65530, 0, 8, 6)
