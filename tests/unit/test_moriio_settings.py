"""MoRIIO's settings: accepted with its meaning and defaults, or refused with the way out."""

from typing import Any

import pytest

from stateferry.config import Config, control_port, parse_config
from stateferry.errors import ConfigError
from stateferry.moriio import Address, Moriio, read_settings, speaks_moriio
from stateferry.moriio.settings import KEYS

HOST = "10.0.0.7"
USUAL = {
    "read_mode": "true",
    "proxy_ip": "10.0.0.1",
    "proxy_ping_port": "36367",
    "http_port": "20005",
    "handshake_port": 6301,
    "notify_port": 61005,
}
"""As users of MoRIIO write it, with the text and numbers that launchers make of it."""


def read(**extra: Any) -> tuple[Config, Moriio]:
    return read_settings(extra, default_host=HOST, environ={})


def test_a_usual_configuration_is_accepted_as_it_stands() -> None:
    config, moriio = read(**USUAL)
    assert (config.host, config.port, config.lease_s, config.transfer_timeout_s) == (HOST, 6301, 60.0, 30.0)
    assert moriio.address == Address(HOST, 6301, 61005)
    assert moriio.http_port == 20005
    assert moriio.proxy == Address("10.0.0.1", 36367, 0)


def test_what_is_left_out_is_what_it_is_in_moriio() -> None:
    """The lease is `defer_timeout`, 60 s. A key that is empty counts as left out."""
    config, moriio = read(read_mode=True, handshake_port="", notify_port=None, http_port=8000)
    assert (config.port, config.lease_s, config.transfer_timeout_s) == (6301, 60.0, 30.0)
    assert moriio.address.notify == 61005
    assert moriio.proxy is None


def test_only_its_keys_make_a_configuration_moriio() -> None:
    assert all(speaks_moriio({key: 1}) for key in KEYS)
    assert not speaks_moriio({"host": HOST, "port": 1})
    ours = set(Config.__struct_fields__)
    assert not KEYS & ours, "a key of ours would turn MoRIIO's words on"


def test_our_keys_may_stand_beside_them() -> None:
    config, _ = read(**USUAL, transport="cma", lease_s=5, bind_host="0.0.0.0")
    assert (config.transport.value, config.lease_s, config.bind_host) == ("cma", 5.0, "0.0.0.0")
    with pytest.raises(ConfigError, match=r"unknown key 'leese_s'"):
        read(**USUAL, leese_s=1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"host_ip": "10.0.0.2"}, {"host": "10.0.0.3"}),
        ({"handshake_port": 7000}, {"port": 7001}),
        ({"defer_timeout": 5}, {"lease_s": 6}),
        ({"transfer_timeout": 5}, {"transfer_timeout_s": 6}),
        ({"num_workers": 5}, {"mori_num_workers": 6}),
    ],
)
def test_one_thing_said_in_both_words_is_refused(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"say the same thing: remove one"):
        read(read_mode=True, **theirs, **ours)


@pytest.mark.parametrize("yes", [True, "true", "True", " TRUE ", "1", 1])
def test_every_yes_of_moriio_is_read_mode(yes: Any) -> None:
    read(read_mode=yes)


@pytest.mark.parametrize("extra", [{}, {"read_mode": False}, {"read_mode": "no"}, {"read_mode": "yes"}])
def test_write_is_refused_with_the_way_out(extra: dict[str, Any]) -> None:
    """F3.13, F2.8: WRITE with recurrent groups is a stated error; false is MoRIIO's default."""
    with pytest.raises(ConfigError, match=r"READ mode only in MoRIIO, too\. Set 'read_mode': true on both"):
        read(http_port=8000, **extra)


@pytest.mark.parametrize("key", ["transfer_timeout", "defer_timeout", "recv_abort_timeout"])
@pytest.mark.parametrize("value", [0, -1, "0", "nan", "inf", float("inf"), "soon", None, [], ""])
def test_a_timeout_that_is_none_is_refused_with_its_key(key: str, value: Any) -> None:
    """F1.10."""
    with pytest.raises(ConfigError, match=rf"{key} = .* must be finite and greater than zero"):
        read(read_mode=True, **{key: value})


def test_timeouts_may_be_text() -> None:
    """F1.10."""
    config, _ = read(read_mode=True, transfer_timeout="1.5", defer_timeout="2.5", recv_abort_timeout="9")
    assert (config.transfer_timeout_s, config.lease_s) == (1.5, 2.5)


def test_the_earlier_of_two_limits_ends_a_read() -> None:
    """W6: between 30 s and 120 s a read that was late was neither waited for nor failed."""
    assert read(read_mode=True, recv_abort_timeout=7)[0].transfer_timeout_s == 7.0
    old = {"VLLM_MORIIO_TRANSFER_TIMEOUT_S": "8"}
    config, _ = read_settings({"read_mode": True}, default_host=HOST, environ=old)
    assert config.transfer_timeout_s == 8.0
    config, _ = read_settings({"read_mode": True, "recv_abort_timeout": 9}, default_host=HOST, environ=old)
    assert config.transfer_timeout_s == 9.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("handshake_port", 70000),
        ("handshake_port", -1),
        ("notify_port", "many"),
        ("http_port", 1.5),
        ("proxy_ping_port", [1]),
        ("backend", "tcp"),
        ("qp_per_transfer", "two"),
        ("post_batch_size", {}),
        ("num_workers", "x"),
        ("transfer_timeout", 1e9),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as e:
        read(read_mode=True, **{key: value})
    assert key in str(e.value)
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("missing", ["proxy_ping_port", "http_port"])
def test_a_router_that_cannot_be_told_enough_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"'proxy_ip' = .*needs .*'{missing}'"):
        read(**{key: value for key, value in USUAL.items() if key != missing})


def test_what_has_no_effect_is_named_in_one_warning() -> None:
    _, moriio = read(**USUAL, backend="XGMI", qp_per_transfer=2, post_batch_size="-1", num_workers=4)
    set_here = ("notify_port", "backend", "qp_per_transfer", "post_batch_size", "num_workers")
    assert moriio.idle == set_here
    assert all(key in moriio.warning.partition(". ")[0] for key in set_here)
    assert "\n" not in moriio.warning
    _, quiet = read(read_mode=True, handshake_port=1234, http_port=1, defer_timeout=3)
    assert quiet.warning == ""


@pytest.mark.parametrize(("transport", "rocm"), [("mori", False), ("auto", True)])
def test_options_of_mori_are_mori_s_where_it_moves_the_bytes(transport: str, rocm: bool) -> None:
    options = {"backend": "XGMI", "qp_per_transfer": "2", "post_batch_size": 8, "num_workers": "4"}
    extra = {"read_mode": True, "transport": transport, **options}
    config, moriio = read_settings(extra, default_host=HOST, environ={}, rocm=rocm)
    assert config.mori_backend.value == "xgmi"
    assert config.mori_qp_per_transfer == 2
    assert config.mori_post_batch_size == 8
    assert config.mori_num_workers == 4
    assert moriio.idle == ()
    _, elsewhere = read_settings({**extra, "transport": "cma"}, default_host=HOST, environ={}, rocm=rocm)
    assert elsewhere.idle == tuple(options)


def test_environment_variables_that_moriio_ignores_are_named() -> None:
    environ = {"VLLM_MORIIO_CONNECTOR_READ_MODE": "1", "VLLM_MORIIO_NUM_WORKERS": "3"}
    _, moriio = read_settings({"read_mode": True}, default_host=HOST, environ=environ)
    assert moriio.idle == tuple(environ)
    with pytest.raises(ConfigError, match="read_mode"):
        read_settings({"http_port": 1}, default_host=HOST, environ=environ)


def test_engines_find_each_other_without_a_key_as_with_moriio() -> None:
    """MoRIIO knows no key; with one of ours the sockets are closed again."""
    assert read(**USUAL)[0].auth.value == "none"
    assert read(**USUAL, auth_key_file="f")[0].auth.value == "auto"
    assert parse_config({}).auth.value == "auto"


def test_a_port_that_the_system_picks_cannot_be_computed() -> None:
    with pytest.raises(ConfigError, match=r"'port' = 0"):
        read(read_mode=True, port=0)


def test_no_two_ranks_of_data_parallel_engines_share_a_port() -> None:
    """W14: with DP 2 and TP 2 the other connector listens on +0, +1, +1, +2 and dials +0 to +3."""
    config, _ = read(read_mode=True)
    ports = [control_port(config.port, engine, 2, rank) for engine in range(2) for rank in range(2)]
    assert ports == [6301, 6302, 6303, 6304]
