"""Control sockets with a key: who has it talks, who has not is turned away and counted."""

import logging
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from stateferry.config import Auth, Config
from stateferry.errors import ConfigError
from stateferry.ferry import guard
from stateferry.ferry.keys import ControlKey, read_key, write_key
from stateferry.testing.peers import EngineRank, wait_until

pytestmark = pytest.mark.timeout(300)

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
PATIENCE_S = 120.0


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "one.key", tmp_path / "two.key"]
    for path in made:
        write_key(path)
    return made


def config(file: Path | None, handshake_timeout_s: float = 0.5) -> Config:
    return Config(auth_key_file=str(file or ""), handshake_timeout_s=handshake_timeout_s)


def works(producer: EngineRank, consumer: EngineRank, name: str = "good") -> bool:
    return not consumer.read(name, producer.grant(40, TABLES, name), LOCAL, PATIENCE_S).failed


def test_engines_with_the_same_key_hand_over(files: list[Path]) -> None:
    settings = Config(auth_key_file=str(files[0]))
    with EngineRank("p", config=settings) as producer, EngineRank("d", config=settings) as consumer:
        producer.write_tags(1)
        assert works(producer, consumer)
        assert consumer.page(1, 8) == producer.page(1, 4)
        assert producer.ferry.counters.refused_peers == 0


@pytest.mark.parametrize(
    ("theirs", "ours"), [(0, 1), (0, None), (None, 0)], ids=["another", "none", "not wanted"]
)
def test_a_peer_with_another_key_is_turned_away_within_the_hand_shakes_time(
    files: list[Path], theirs: int | None, ours: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [config(None if i is None else files[i]) for i in (theirs, ours)]
    with EngineRank("p", config=settings[0]) as producer, EngineRank("d", config=settings[1]) as consumer:
        before = consumer.memory.bytes.copy()
        results = consumer.read("r", producer.grant(40, TABLES), LOCAL)
        assert results.failed == {"r"}
        assert "within 0.5 s" in results.reports[-1].reason
        assert "auth_key_file" in results.reports[-1].reason
        assert (before == consumer.memory.bytes).all()
        wait_until(lambda: producer.ferry.counters.refused_peers > 0)
        assert producer.ferry.counters.claimed == 0
        turned_away = [r for r in caplog.records if "turned a peer away" in r.getMessage()]
        assert len(turned_away) == 1, "one line, however often the peer tries"
        assert "auth_key_file" in turned_away[0].getMessage()
        assert producer.ferry.alive
        with EngineRank("e", config=config(None if theirs is None else files[theirs], PATIENCE_S)) as honest:
            assert works(producer, honest)


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", own: ControlKey, server: bytes, port: int
) -> "zmq.Socket[bytes]":
    made = context.socket(zmq.DEALER)
    made.curve_publickey, made.curve_secretkey, made.curve_serverkey = own.public, own.secret, server
    made.connect(f"tcp://127.0.0.1:{port}")
    return made


def test_who_knows_the_public_half_only_is_turned_away(files: list[Path]) -> None:
    """The public half is shown to nobody, but it is no secret that anything may rest on."""
    key = read_key(str(files[0]))
    with EngineRank("p", config=config(files[0])) as producer, ExitStack() as stack:
        assert producer.address is not None
        context = stack.enter_context(zmq.Context())
        stranger = stack.enter_context(
            dealer(context, ControlKey(*zmq.curve_keypair()), key.public, producer.address.port)
        )
        stranger.linger = 0
        stranger.send(b"let me in")
        wait_until(lambda: producer.ferry.counters.refused_peers > 0)
        assert stranger.poll(100) == 0


def test_the_check_of_the_clients_key_is_what_turns_it_away(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: a guard that compares nothing lets the stranger in."""

    class Anybody:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    key = read_key(str(files[0]))
    monkeypatch.setattr(ControlKey, "public_bytes", Anybody())
    with EngineRank("p", config=config(files[0])) as producer, ExitStack() as stack:
        assert producer.address is not None
        context = stack.enter_context(zmq.Context())
        stranger = stack.enter_context(
            dealer(context, ControlKey(*zmq.curve_keypair()), key.public, producer.address.port)
        )
        stranger.linger = 0
        stranger.send(b"let me in")
        assert stranger.poll(20_000), "let in, it is answered: with a refusal of its message"


def test_without_its_judge_a_listener_lets_nobody_in(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ZAP_ADDRESS", "inproc://nobody.asks.here")
    with (
        EngineRank("p", config=config(files[0])) as producer,
        EngineRank("d", config=config(files[0])) as consumer,
    ):
        assert not works(producer, consumer)


def test_strangers_without_end_do_not_keep_an_engine_from_its_work(files: list[Path]) -> None:
    settings = Config(
        auth_key_file=str(files[0]), handshake_timeout_s=600, lease_s=600, transfer_timeout_s=600
    )  # that the machine is slow is not what is tested
    with EngineRank("p", config=settings) as producer, EngineRank("d", config=settings) as consumer:
        assert producer.address is not None
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10 + b"\x7f", b"\x00" * 64) * 20:
            with socket.create_connection(("127.0.0.1", producer.address.port)) as raw:
                raw.sendall(junk)
        assert works(producer, consumer)
        assert producer.ferry.alive


def test_an_open_address_without_a_key_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="auth_key_file"):
        EngineRank("p", bind_host="0.0.0.0").ferry.start()


def test_an_open_address_is_possible_where_it_is_asked_for_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Config(auth=Auth.NONE)
    with (
        EngineRank("p", config=settings, bind_host="0.0.0.0") as producer,
        EngineRank("d", config=settings) as consumer,
    ):
        assert works(producer, consumer)
    assert [r.getMessage()[:16] for r in caplog.records if r.levelno >= logging.WARNING] == [
        "auth is 'none': "
    ]


def test_an_open_address_with_a_key_works(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    settings = Config(auth_key_file=str(files[0]))
    with (
        EngineRank("p", config=settings, bind_host="0.0.0.0") as producer,
        EngineRank("d", config=settings) as consumer,
    ):
        assert works(producer, consumer)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
