"""The key file: made once, read strictly, asked for wherever other machines could reach us."""

import os
import re
import stat
from pathlib import Path

import pytest
import zmq
from tests.command import run

from stateferry.config import Auth, Config
from stateferry.errors import ConfigError
from stateferry.ferry.keys import FORMAT, control_key, is_loopback, numeric, read_key, write_key

REACHABLE = [
    "0.0.0.0",
    "::",
    "*",
    "10.0.0.1",
    "192.168.1.7",
    "fe80::1",
    "somewhere.example",
    "localhost.example",
]
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "localhost"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_key(tmp_path / "control.key")
    return tmp_path / "control.key"


def test_a_new_key_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o277):
        before = os.umask(umask)
        try:
            write_key(tmp_path / f"{umask}.key")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{umask}.key").stat().st_mode) == 0o600


def test_a_key_is_a_pair_that_fits_and_differs_from_the_next(tmp_path: Path) -> None:
    keys = []
    for name in ("a", "b"):
        write_key(tmp_path / name)
        keys.append(read_key(str(tmp_path / name)))
    assert keys[0] != keys[1]
    assert all(zmq.curve_public(key.secret) == key.public and len(key.public_bytes) == 32 for key in keys)
    assert read_key(str(tmp_path / "a")) == keys[0]
    assert keys[0].secret.decode() not in repr(keys[0])


def test_a_file_that_is_there_is_never_overwritten(file: Path) -> None:
    before = file.read_text()
    with pytest.raises(ConfigError, match="not overwritten"):
        write_key(file)
    assert file.read_text() == before


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o610, 0o644, 0o666])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"mode 0\d{3}: others.*chmod 600"):
        read_key(str(file))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_of_its_owner_and_group_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_key(str(file))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n\n# nothing but a comment\n",
        FORMAT,
        f"{FORMAT} ",
        f"{FORMAT} {'0' * 63}",
        f"{FORMAT} {'0' * 65}",
        f"{FORMAT} {'g' * 64}",
        f"stateferry-key-2 {'0' * 64}",
        f"{FORMAT} {'0' * 64}\n{FORMAT} {'1' * 64}",
        "0" * 64,
        f"{FORMAT} {'0' * 64}\n#" + "x" * 5000,
        "\x00" * 100,
        "ü" * 64,
    ],
)
def test_a_file_that_holds_no_key_is_refused_without_showing_what_it_holds(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no key") as e:
        read_key(str(file))
    assert "0" * 63 not in str(e.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*stateferry key"):
        read_key(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path))
    with pytest.raises(ConfigError, match="not a file"):
        read_key("/dev/null")


@pytest.mark.parametrize("host", REACHABLE)
def test_an_address_that_others_reach_wants_a_key_or_a_plain_no(host: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(host)}.*stateferry key.*auth_key_file.*'none'"):
        control_key(Config(), host)
    assert control_key(Config(auth_key_file=str(file)), host) == read_key(str(file))
    assert control_key(Config(auth=Auth.NONE), host) is None


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_wants_none_but_takes_one(host: str, file: Path) -> None:
    assert control_key(Config(), host) is None
    assert control_key(Config(auth_key_file=str(file)), host) is not None


def test_settings_that_contradict_each_other_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="remove one"):
        control_key(Config(auth=Auth.NONE, auth_key_file=str(file)), "127.0.0.1")


def test_nobody_else_reaches_an_engine_unless_told_otherwise() -> None:
    assert is_loopback(Config().bind_host or Config().host)


def test_peers_are_given_an_address_to_dial_and_no_name() -> None:
    assert is_loopback(numeric("localhost"))
    assert numeric("10.0.0.1") == "10.0.0.1"
    assert numeric("::1") == "::1"
    with pytest.raises(ConfigError, match="has no address"):
        numeric("no host; at all")


def test_the_command_writes_a_file_that_engines_read(tmp_path: Path) -> None:
    path = tmp_path / "new.key"
    assert run("key", str(path)).returncode == 0
    secret = path.read_text().split()[-1]
    assert read_key(str(path))
    again = run("key", str(path))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert secret not in again.stdout + again.stderr
    nowhere = run("key", str(tmp_path / "no" / "folder" / "x"))
    assert nowhere.returncode == 2
    assert "Traceback" not in nowhere.stderr


def test_serve_refuses_an_open_address_before_it_starts_anything(file: Path) -> None:
    refused = run("serve", "prefill", "m", "--kv-host", "10.0.0.1", "--dry-run")
    assert refused.returncode == 2
    assert "stateferry key" in refused.stderr
    served = run("serve", "prefill", "m", "--kv-host", "10.0.0.1", "--auth-key-file", str(file), "--dry-run")
    assert served.returncode == 0
    assert str(file) in served.stdout
    assert file.read_text().split()[-1] not in served.stdout + served.stderr
