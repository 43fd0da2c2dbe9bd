"""A layout on the wire, and what two engines must have in common."""

import random

import msgspec
import pytest

from stateferry.errors import LayoutError, LayoutMismatch, ProtocolError
from stateferry.layout import fingerprint
from stateferry.layout.fingerprint import compare, decode_layout, encode_layout
from stateferry.layout.spec import CacheLayout, Part, PartRule
from stateferry.testing.caches import Model, Tensor

HEADS = (Part(name="heads", size=8, rule=PartRule.SPLIT),)
MODEL = Model(((Tensor("conv", (6,)), Tensor("matrix", (HEADS, 4))),) * 2)
FACTS = {"model": "tiny", "kv_cache_dtype": "auto", "conv_layout": "SD"}


def layout(rank: int = 0, size: int = 1, seed: int = 0, blocks: int = 5, **facts: str) -> CacheLayout:
    return msgspec.structs.replace(MODEL.layout(rank, size, seed, blocks), facts={**FACTS, **facts})


def test_a_layout_comes_back_as_it_was_sent() -> None:
    for made in (layout(), layout(1, 4, seed=3), layout(seed=2, blocks=9)):
        assert decode_layout(encode_layout(made)) == made


def test_a_layout_of_a_thousand_layers_is_small() -> None:
    large = Model(MODEL.layers[:1] * 1000).layout(0, 1)
    assert len(encode_layout(large)) < 1 << 20


def test_garbage_is_a_protocol_error() -> None:
    good = encode_layout(layout())
    rng = random.Random(7)
    bad = [b"", b"\xc1", b"{}", good[:-1], good + b"\0", b"\x80", msgspec.msgpack.encode({"engine_id": 4})]
    for _ in range(200):
        at = rng.randrange(len(good))
        bad.append(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
    for data in bad:
        try:
            decoded = decode_layout(data)
        except ProtocolError:
            continue
        assert encode_layout(decoded) != good, "a damaged message must not pass for the good one"


def test_a_peer_cannot_name_bytes_outside_its_regions() -> None:
    """F2.3, F2.4: a slot that ends past its storage is refused."""
    wrong = msgspec.structs.replace(layout(), region_sizes_bytes=(10,))
    with pytest.raises(ProtocolError, match=r"contradicts itself.*ends at byte"):
        decode_layout(msgspec.msgpack.encode(wrong))


def test_too_much_is_neither_read_nor_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_layout(layout())
    monkeypatch.setattr(fingerprint, "MAX_LAYOUT_BYTES", len(data) - 1)
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes"):
        decode_layout(data)
    with pytest.raises(LayoutError, match=f"takes {len(data)} bytes"):
        encode_layout(layout())


def test_engines_of_one_kind_may_differ_in_place_and_size() -> None:
    ours = layout()
    compare(ours, layout(seed=3, blocks=9))
    compare(ours, layout(1, 4))
    other = msgspec.structs.replace(ours, engine_id="another", epoch=77)
    compare(ours, other)


@pytest.mark.parametrize(
    ("facts", "field", "advice"),
    [
        ({"model": "other"}, "facts.model", "same model"),
        ({"kv_cache_dtype": "fp8"}, "facts.kv_cache_dtype", "--kv-cache-dtype"),
        ({"conv_layout": "DS"}, "facts.conv_layout", "VLLM_SSM_CONV_STATE_LAYOUT"),
        ({"vllm_version": "0.33.0"}, "facts.vllm_version", "same version of vLLM"),
        ({"a_new_fact": "yes"}, "facts.a_new_fact", "same flags"),
        ({"hf_config.rope.theta": "1"}, "facts.hf_config.rope.theta", "same model folder"),
        ({"hf_config.dtype": "1"}, "facts.hf_config.dtype", "same model folder"),
    ],
)
def test_a_differing_fact_is_named_with_what_to_change(
    facts: dict[str, str], field: str, advice: str
) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        compare(layout(), layout(**facts))
    assert caught.value.field == field
    assert caught.value.theirs == next(iter(facts.values()))
    assert advice in str(caught.value)
    with pytest.raises(LayoutMismatch) as reverse:
        compare(layout(**facts), layout())
    assert reverse.value.ours == caught.value.theirs


def test_shapes_are_compared_too() -> None:
    with pytest.raises(LayoutMismatch, match=r"groups\[0\]\.layers"):
        compare(layout(), msgspec.structs.replace(Model(MODEL.layers[:1]).layout(0, 1), facts=FACTS))
    two = msgspec.structs.replace(layout(), groups=layout().groups * 2)
    with pytest.raises(LayoutMismatch, match=r"groups\.count"):
        compare(layout(), two)


def test_every_advice_names_a_field_that_exists() -> None:
    """Advice for a field that was renamed would silently stop being given."""
    shape_fields = {"tp_size", "block_tokens", "scratch_slots", "dtype"}
    for field in fingerprint._ADVICE:
        assert field in shape_fields or field.startswith("facts.")


def opaque(made: CacheLayout) -> CacheLayout:
    """The same cache, had nobody known what is inside a page."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            layers=tuple(
                msgspec.structs.replace(
                    one,
                    tensors=tuple(
                        msgspec.structs.replace(
                            t, axis=None, parts=(), opaque=True, loops=(), unit_bytes=t.block_bytes
                        )
                        for t in one.tensors
                    ),
                )
                for one in group.layers
            ),
        )
        for group in made.groups
    )
    return msgspec.structs.replace(made, groups=groups)


def test_unknown_pages_of_unequal_sizes_are_refused_for_their_size_and_nothing_else() -> None:
    """They differ in bytes as well, for which the advice was to use the same flags: they were the same."""
    compare(opaque(layout(1, 2)), opaque(layout(0, 2)))
    with pytest.raises(LayoutMismatch, match=r"--tensor-parallel-size") as caught:
        compare(opaque(layout(0, 2)), opaque(layout()))
    assert caught.value.field == "groups[0].layer0.conv.tp_size"
    assert (caught.value.ours, caught.value.theirs) == (2, 1)
