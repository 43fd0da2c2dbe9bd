"""Messages and kv_transfer_params: what is read, what is refused, and that nothing else escapes."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateferry.block_ids import BlockIds
from stateferry.errors import ProtocolError
from stateferry.ids import EngineId, Epoch, RequestId, TransferId, new_epoch, new_transfer_id
from stateferry.session import claimant_name
from stateferry.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Await,
    AwaitAnswer,
    Claim,
    ClaimAnswer,
    Claimed,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    Offer,
    RankAddress,
    Refusal,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewalAnswer,
    Welcome,
    decode_frames,
    decode_message,
    encode_message,
    is_decode_leg,
    is_prefill_leg,
    offer_to_params,
    parse_offer,
)

EPOCH, TRANSFER, ENGINE = Epoch(7), TransferId("0123456789abcdef" * 2), EngineId("p")
MESSAGES: list[Message] = [
    Hello(
        protocol=1,
        software="s",
        engine_id=ENGINE,
        epoch=EPOCH,
        expects_epoch=EPOCH,
        transport="cma",
        layout=b"l",
    ),
    Welcome(protocol=1, software="s", engine_id=ENGINE, epoch=EPOCH, layout=b"l", registration=b"r"),
    Refusal(reason="no", epoch=EPOCH),
    Claim(epoch=EPOCH, transfer_id=TRANSFER, claimant="d/r", tp_rank=0, tp_size=1, table_digest="d" * 32),
    ClaimAnswer(transfer_id=TRANSFER, claimant="d/r", lease_s=15.0),
    Renewal(epoch=EPOCH, sequence=3, claims=(Claimed(TRANSFER, "d/r"),)),
    RenewalAnswer(sequence=3, held=(TRANSFER,), lost=(), lease_s=15.0),
    DigestRequest(
        epoch=EPOCH, transfer_id=TRANSFER, claimant="d/r", groups=(0,), first_blocks=(0,), block_counts=(3,)
    ),
    DigestAnswer(transfer_id=TRANSFER, digests=("d" * 32,)),
    Release(epoch=EPOCH, transfer_id=TRANSFER, claimant="d/r", tp_rank=0, tp_size=1, received=True),
    ReleaseAnswer(transfer_id=TRANSFER, known=True),
    Await(transfer_id=TRANSFER),
    AwaitAnswer(epoch=EPOCH, transfer_id=TRANSFER, params=b"p"),
]


def offer() -> Offer:
    return Offer(
        transfer_id=TransferId("0123456789abcdef" * 2),
        engine_id=ENGINE,
        request_id=RequestId("cmpl-1"),
        num_tokens=40,
        block_ids=(BlockIds((1, 2, 3)), BlockIds((4,))),
        first_blocks=(0, 2),
        prefix_digest="f" * 32,
        lease_s=15.0,
        ranks=(RankAddress("10.0.0.1", 4567, EPOCH), RankAddress("10.0.0.1", 4568, EPOCH)),
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_every_kind_of_message_is_tried_above() -> None:
    assert {type(m) for m in MESSAGES} == set(Message.__args__)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_message(frame)


@given(st.data())
@settings(max_examples=200, deadline=None)  # a busy machine stops for seconds
def test_damaged_messages_are_messages_or_protocol_errors(data: st.DataObject) -> None:
    frame = bytearray(encode_message(data.draw(st.sampled_from(MESSAGES))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_message(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


def test_deep_nesting_and_great_size_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError):
        decode_message(b"\x91" * 100_000)
    with pytest.raises(ProtocolError, match="at most"):
        decode_message(b"\x00" * (MAX_MESSAGE_BYTES + 1))


def test_unknown_fields_and_unknown_types_are_refused() -> None:
    known = msgspec.msgpack.decode(encode_message(MESSAGES[3]))
    with pytest.raises(ProtocolError, match="extra"):
        decode_message(msgspec.msgpack.encode({**known, "extra": 1}))
    with pytest.raises(ProtocolError, match="surprise"):
        decode_message(msgspec.msgpack.encode({**known, "type": "surprise"}))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("Claim", "transfer_id", "x" * 32),
        ("Claim", "transfer_id", "0" * 33),
        ("Claim", "transfer_id", "0" * 32 + "\n"),
        ("Claim", "claimant", ""),
        ("Claim", "claimant", "x" * 1025),
        ("Claim", "tp_rank", -1),
        ("Claim", "tp_size", 0),
        ("Claim", "tp_size", 1 << 40),
        ("Claim", "table_digest", ""),
        ("Claim", "epoch", -1),
        ("Release", "tp_rank", 1 << 40),
        ("ClaimAnswer", "lease_s", float("nan")),
        ("ClaimAnswer", "lease_s", float("inf")),
        ("RenewalAnswer", "lease_s", -1.0),
        ("Renewal", "claims", [["0" * 32]]),
        ("Renewal", "claims", [["0" * 32, "d/r", 1]]),
        ("Renewal", "claims", [["0" * 32, "d/r"]] * 65537),
        ("DigestRequest", "groups", [0] * 1025),
        ("DigestRequest", "first_blocks", [-1]),
        ("DigestRequest", "block_counts", [1 << 40]),
        ("DigestAnswer", "digests", ["x"]),
        ("Hello", "layout", b"x" * ((8 << 20) + 1)),
        ("Welcome", "registration", b"x" * ((1 << 20) + 1)),
        ("Refusal", "reason", "x" * 1025),
    ],
    ids=lambda value: str(value)[:20].strip(),
)
def test_a_field_out_of_bounds_is_a_protocol_error(kind: str, field: str, value: Any) -> None:
    message = next(m for m in MESSAGES if type(m).__name__ == kind)
    known = msgspec.msgpack.decode(encode_message(message))
    assert field in known
    with pytest.raises(ProtocolError, match=field):
        decode_message(msgspec.msgpack.encode({**known, field: value}))


def test_a_message_is_one_frame() -> None:
    frame = encode_message(MESSAGES[3])
    assert decode_frames([frame]) == MESSAGES[3]
    for frames in ([], [frame, frame], [b"", frame]):
        with pytest.raises(ProtocolError, match="frames"):
            decode_frames(frames)


def test_a_claimants_name_can_always_be_read_whatever_a_client_calls_its_request() -> None:
    names = ["r", "r" * 5000, "r" * 5001, "\ud800", "\ud801", "ä", "a\nb", "a\rb", "\x00", ""]
    made = [claimant_name(ENGINE, RequestId(name)) for name in names]
    assert made[0] == "p/r"
    assert len(set(made)) == len(names)
    for name in made:
        claim = msgspec.structs.replace(MESSAGES[3], claimant=name)
        assert decode_message(encode_message(claim)) == claim
        assert name.isprintable()
        assert len(name) <= 256


def test_params_survive_json_and_carry_the_names_that_routers_know() -> None:
    params = json.loads(json.dumps(offer_to_params(offer())))
    assert parse_offer(params) == offer()
    assert is_decode_leg(params)
    assert not is_prefill_leg(params)
    assert params["remote_engine_id"] == "p"
    assert params["remote_block_ids"] == [[1, 2, 3], [4]]
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("10.0.0.1", 4567, 2)


def test_a_router_may_add_fields_of_its_own() -> None:
    params = {**offer_to_params(offer()), "router_trace": {"x": 1}}
    assert parse_offer(params) == offer()


BAD: list[tuple[str, Any]] = [
    ("remote_block_ids", None),
    ("remote_block_ids", []),
    ("remote_block_ids", [1, 2, 3]),
    ("remote_block_ids", "123"),
    ("remote_block_ids", [["1"]]),
    ("remote_block_ids", [[-1], [4]]),
    ("remote_block_ids", [[1 << 31], [4]]),
    ("remote_block_ids", [[1 << 70], [4]]),
    ("remote_block_ids", [[1.0], [4]]),
    ("remote_block_ids", [[True], [4]]),
    ("remote_block_ids", [[[1]], [4]]),
    ("remote_block_ids", [[1, 2, 3]]),
    ("remote_engine_id", None),
    ("remote_engine_id", 5),
    ("remote_request_id", ""),
    ("stateferry", None),
    ("stateferry", "yes"),
    ("stateferry.version", 99),
    ("stateferry.num_tokens", 0),
    ("stateferry.num_tokens", "40"),
    ("stateferry.num_tokens", 1.5),
    ("stateferry.first_blocks", [0]),
    ("stateferry.lease_s", float("nan")),
    ("stateferry.lease_s", float("inf")),
    ("stateferry.lease_s", -1),
    ("stateferry.prefix_digest", "x"),
    ("stateferry.transfer_id", "../../etc"),
    ("stateferry.ranks", []),
    ("stateferry.ranks", [["10.0.0.1", 0, 1]]),
    ("stateferry.ranks", [["", 1, 1]]),
    ("stateferry.ranks", [["10.0.0.1", 1]]),
    ("stateferry.ranks", [["10.0.0.1", 1, 0]]),
    ("stateferry.tamper", "x"),
    ("stateferry.transfer_id", "0" * 32 + "\n"),
    ("stateferry.prefix_digest", "0" * 32 + "\n"),
    ("stateferry.ranks", [["10.0.0.1", 1, 1], ["10.0.0.1", 1, 1]]),
    ("stateferry.ranks", [[f"10.0.{i}.{j}", 1, 1] for i in range(2) for j in range(200)]),
    ("stateferry.ranks", [["slow.example", 1, 1]]),
    ("stateferry.ranks", [["a;b", 1, 1]]),
    ("stateferry.ranks", [["a\nb", 1, 1]]),
    ("remote_engine_id", "a\nb"),
    ("remote_engine_id", "\ud800"),
    ("remote_request_id", "x" * 513),
]


@pytest.mark.parametrize(("path", "value"), BAD, ids=lambda v: str(v)[:30])
def test_bad_params_are_protocol_errors(path: str, value: Any) -> None:
    params: dict[str, Any] = offer_to_params(offer())
    *parents, last = path.split(".")
    inner = params
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    with pytest.raises(ProtocolError):
        parse_offer(params)


@pytest.mark.parametrize("key", sorted(offer_to_params(offer())["stateferry"]))
def test_a_missing_field_is_named(key: str) -> None:
    params = offer_to_params(offer())
    del params["stateferry"][key]
    with pytest.raises(ProtocolError, match=key):
        parse_offer(params)


def test_another_connectors_params_are_named_as_such() -> None:
    params = offer_to_params(offer())
    del params["stateferry"]
    with pytest.raises(ProtocolError, match="another connector"):
        parse_offer(params)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from([*offer_to_params(offer()), "x"]), JSON))
def test_any_json_is_an_offer_or_a_protocol_error(params: dict[str, Any]) -> None:
    with contextlib.suppress(ProtocolError):
        parse_offer(params)


@pytest.mark.parametrize("value", [None, {}, {"do_remote_decode": "true"}, {"do_remote_decode": 1}])
def test_a_leg_must_be_asked_for_plainly(value: dict[str, Any] | None) -> None:
    assert not is_prefill_leg(value)
    assert not is_decode_leg(value)


def test_ids_are_unique_and_survive_a_double() -> None:
    assert len({new_transfer_id() for _ in range(100)}) == 100
    epochs = {new_epoch() for _ in range(100)}
    assert len(epochs) == 100
    assert all(0 < e < 1 << 53 and int(float(e)) == e for e in epochs)


def test_the_protocol_has_a_version() -> None:
    assert PROTOCOL_VERSION == 2
