"""Offers in MoRIIO's words: what a router sees of them, and what comes back whichever router carried them."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateferry.block_ids import BlockIds
from stateferry.config import control_port
from stateferry.errors import ProtocolError
from stateferry.ids import EngineId, Epoch, RequestId, TransferId
from stateferry.layout.spec import Group, GroupKind
from stateferry.moriio import Address, MoriioDialect, addresses_in, parse_address, request_id
from stateferry.wire import Offer, RankAddress, parse_offer

P, D = Address("10.0.0.1", 6301, 61005), Address("fe80::2", 7301, 7005)
UNIQUE = "0123456789abcdef" * 2
ID = request_id(P, D, UNIQUE)
ASKED = {"do_remote_decode": True, "transfer_id": f"tx-{UNIQUE}"}


def group(kind: GroupKind, transfers: bool = True) -> Group:
    return Group(kind=kind, block_tokens=4, layers=(), transfers=transfers)


STATE, ATTENTION, WINDOW = (group(kind) for kind in (GroupKind.STATE, GroupKind.ATTENTION, GroupKind.WINDOW))
LEFT_OUT = group(GroupKind.ATTENTION, transfers=False)
HYBRID = (STATE, LEFT_OUT, STATE, ATTENTION)
"""As vLLM sorts them, and a group that is kept out of transfers between them."""
TABLES = (BlockIds((5,)), BlockIds(), BlockIds((6,)), BlockIds((1, 2, 3)))
FIRSTS = (2, 0, 2, 0)


def ranks(address: Address, index: int, size: int) -> tuple[RankAddress, ...]:
    return tuple(
        RankAddress(address.host, control_port(address.handshake, index, size, r), Epoch(7 + r))
        for r in range(size)
    )


def offer(address: Address = P, index: int = 0, size: int = 2, **changes: Any) -> Offer:
    made = Offer(
        transfer_id=TransferId("ab" * 16),
        engine_id=EngineId("vllm's"),
        request_id=RequestId("cmpl-1"),
        num_tokens=10,
        block_ids=TABLES,
        first_blocks=FIRSTS,
        prefix_digest="f" * 32,
        lease_s=60.0,
        ranks=ranks(address, index, size),
    )
    return msgspec.structs.replace(made, **changes)


def dialect(groups: tuple[Group, ...] = HYBRID, address: Address = P, **place: int) -> MoriioDialect:
    return MoriioDialect(groups, address, **place)


def picked(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a proxy that builds the decode leg's dictionary itself carries over."""
    kept = ("remote_engine_id", "remote_block_ids", "transfer_id")
    return {"do_remote_prefill": True, "do_remote_decode": False, **{k: params[k] for k in kept}, **more}


def what_counts(offer: Offer) -> Offer:
    """Without names that are for logs."""
    return msgspec.structs.replace(offer, engine_id=EngineId(""), request_id=RequestId(""))


# -- addresses -------------------------------------------------------------------------------------


def test_an_address_is_read_as_it_is_written() -> None:
    assert str(P) == "host:10.0.0.1,handshake:6301,notify:61005"
    for address in (P, D):
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:8000",
        "host:10.0.0.1,handshake:6301",
        "host:10.0.0.1,handshake:x,notify:1",
        "host:10.0.0.1,handshake:0,notify:1",
        "host:10.0.0.1,handshake:65536,notify:1",
        "host:,handshake:1,notify:1",
        "host:10.0.0.1,handshake:1e3,notify:1",
    ],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="Malformed zmq_address"):
        parse_address(text)


@pytest.mark.parametrize("wrap", ["{}", "cmpl-{}-0-1a2b3c4d", "chatcmpl-{}-1a2b3c4d", "0_cmpl-{}-0-1a2b3c4d"])
def test_addresses_are_found_in_ids_as_vllm_wraps_them(wrap: str) -> None:
    assert addresses_in(wrap.format(ID)) == (P, D)


@pytest.mark.parametrize(
    "text",
    ["", "cmpl-1", f"___prefill_addr_{P}", f"___decode_addr_{D}_{UNIQUE}", ID[:-1], ID.replace("_0", "_g")],
)
def test_an_id_that_names_nobody_is_no_error(text: str) -> None:
    assert addresses_in(text) is None


@given(st.text(max_size=300) | st.text("_prefilldecodadr:,0123456789abcdefghotnyks", max_size=300))
def test_whatever_an_id_holds_nothing_but_a_protocol_error_comes_out(text: str) -> None:
    for made in (text, f"___prefill_addr_{text}___decode_addr_{text}_{UNIQUE}"):
        try:
            addresses_in(made)
        except ProtocolError:
            continue


# -- what the prefill engine says ------------------------------------------------------------------


def test_attention_comes_first_then_the_recurrent_groups_in_their_order() -> None:
    """F3.1, F3.2: groups are attention or recurrent, what is kept out is gone, nothing is flattened."""
    params = dialect().write(offer(), ASKED)
    assert params["remote_block_ids"] == [[1, 2, 3], [5], [6]]


def test_attention_alone_has_a_list_for_each_group() -> None:
    """F3.2."""
    groups = (WINDOW, ATTENTION)
    params = dialect(groups).write(
        offer(block_ids=(BlockIds((7, 8)), BlockIds((1, 2, 3))), first_blocks=(1, 0)), ASKED
    )
    assert params["remote_block_ids"] == [[7, 8], [1, 2, 3]]


def test_a_response_has_every_field_of_moriio() -> None:
    place = {"data_parallel_index": 3, "data_parallel_size": 4, "data_parallel_size_local": 2}
    params = dialect(**place).write(offer(index=3), ASKED)
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "10.0.0.1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_rank": 3,
        "remote_dp_rank_override": True,
        "remote_dp_size": 4,
        "remote_dp_size_local": 2,
        "tp_size": 2,
        "transfer_id": ASKED["transfer_id"],
    }
    assert expected.items() <= params.items()
    assert params["remote_engine_id"].startswith("10.0.0.1:6301/")
    json.dumps(params)


@pytest.mark.parametrize("given_id", [None, "", 7, "x" * 600, "two\nlines", ["tx"]])
def test_a_transfer_that_the_router_did_not_name_gets_a_name(given_id: Any) -> None:
    params = dialect().write(offer(), {"transfer_id": given_id})
    assert params["transfer_id"] == "sidecar-cmpl-1"


def test_no_offer_is_said_in_the_words_that_proxies_look_for() -> None:
    params = dialect().refuse("too short", ASKED)
    assert params["remote_engine_id"] is params["remote_block_ids"] is None
    assert params["stateferry"] == {"not_offered": "too short"}
    with pytest.raises(ProtocolError, match="made no offer"):
        dialect().read(picked(params), ID)


# -- what the decode engine hears ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8, 256])
def test_a_dictionary_that_was_carried_whole_is_the_offer(size: int) -> None:
    made = offer(size=size)
    read = dialect(address=D).read(json.loads(json.dumps(dialect().write(made, ASKED))), "cmpl-any")
    assert what_counts(read) == what_counts(made)


@pytest.mark.parametrize("size", [1, 2, 8, 256])
@pytest.mark.parametrize("name", [f"cmpl-{ID}-0-1a2b3c4d", "cmpl-1-0-1a2b3c4d"], ids=["id", "no id"])
def test_three_fields_are_enough_for_the_offer(name: str, size: int) -> None:
    """Ports that are dialled are those that are bound: one function says both."""
    made = offer(size=size)
    params = picked(json.loads(json.dumps(dialect().write(made, ASKED))))
    assert what_counts(dialect(address=D).read(params, name)) == what_counts(made)


def test_the_address_in_the_id_counts_where_the_router_dropped_the_ranks() -> None:
    elsewhere = Address("10.0.0.99", 9000, 1)
    params = dialect(data_parallel_index=1, data_parallel_size=2, data_parallel_size_local=2).write(
        offer(index=1), ASKED
    )
    read = dialect(address=D).read(picked(params), request_id(elsewhere, D, UNIQUE))
    assert read.ranks == ranks(elsewhere, 1, 2)
    assert dialect(address=D).read(params, request_id(elsewhere, D, UNIQUE)).ranks == ranks(P, 1, 2)


def test_an_engine_on_another_machine_than_the_one_that_registered_is_dialled_where_it_is() -> None:
    """The id names where the instance registered, which is its first machine."""
    second = Address("10.0.0.2", 6301, 61005)
    place = {"data_parallel_index": 2, "data_parallel_size": 4, "data_parallel_size_local": 2}
    params = dialect(address=second, **place).write(offer(second, index=2), ASKED)
    assert dialect(address=D).read(picked(params), ID).ranks == ranks(second, 2, 2)


@pytest.mark.parametrize("groups", [(STATE, ATTENTION), (*HYBRID, STATE)])
def test_a_model_with_other_groups_is_refused(groups: tuple[Group, ...]) -> None:
    """F3.6, F3.9: a group count that differs is an error, not a shorter transfer."""
    params = dialect().write(offer(), ASKED)
    with pytest.raises(ProtocolError, match=r"remote_block_ids has 3 tables"):
        dialect(groups).read(params, ID)


def test_an_address_in_the_id_that_cannot_be_read_is_refused() -> None:
    params = picked(dialect().write(offer(), ASKED))
    with pytest.raises(ProtocolError, match="Malformed zmq_address"):
        dialect().read(params, f"___prefill_addr_127.0.0.1:8000___decode_addr_{D}_{UNIQUE}")


@pytest.mark.parametrize(
    "engine_id",
    [
        None,
        7,
        "",
        "10.0.0.1:6301",
        "10.0.0.1:6301/",
        "10.0.0.1:6301/!!!",
        "10.0.0.1:6301/é",
        "10.0.0.1:6301/" + base64.urlsafe_b64encode(msgspec.msgpack.encode([1, 2])).decode(),
        "x" * 20_000,
    ],
)
def test_an_engine_id_that_is_not_ours_is_refused(engine_id: Any) -> None:
    params = picked(dialect().write(offer(), ASKED), remote_engine_id=engine_id)
    with pytest.raises(ProtocolError):
        dialect().read(params, ID)


def test_ports_past_the_last_one_are_refused() -> None:
    params = picked(dialect().write(offer(), ASKED))
    with pytest.raises(ProtocolError, match="ports cannot be computed"):
        dialect().read(params, request_id(Address("10.0.0.1", 65535, 1), D, UNIQUE))


@given(st.binary(max_size=200), st.integers(0, 400), st.text(max_size=60))
def test_damaged_params_are_an_offer_or_a_protocol_error(noise: bytes, at: int, own: str) -> None:
    params = picked(dialect().write(offer(), ASKED))
    head, _, text = params["remote_engine_id"].partition("/")
    raw = base64.urlsafe_b64decode(text)
    for damaged in (
        f"{head}/{base64.urlsafe_b64encode(raw[:at] + noise).decode()}",
        f"{head}/{base64.urlsafe_b64encode(noise).decode()}",
        f"{own}/{text}",
        own,
    ):
        try:
            dialect().read({**params, "remote_engine_id": damaged}, "cmpl-1")
        except ProtocolError:
            continue


# -- mutants: what must not go unnoticed -----------------------------------------------------------


def test_tables_in_vllms_order_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3.2: a dialect that forgot to sort fails the tests above."""
    speaker = dialect()
    monkeypatch.setattr(speaker, "_order", tuple(sorted(speaker._order)))
    params = speaker.write(offer(), ASKED)
    assert params["remote_block_ids"] != [[1, 2, 3], [5], [6]]
    assert dialect(address=D).read(params, ID).block_ids != TABLES


def test_our_own_words_are_not_read_for_moriios() -> None:
    """Without the dialect the tables would go to the wrong groups: the plain reader sees three for four."""
    params = dialect().write(offer(size=1), ASKED)
    assert len(parse_offer(params).block_ids) == 3
