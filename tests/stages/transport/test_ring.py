import struct
from mmap import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import ConfigError, HeaderMismatch
from stages.transport.memory import MemoryBell
from stages.transport.ring import (
    CONTROL_BYTES,
    FREE_OFFSET,
    FULL_OFFSET,
    SEQ_MASK,
    SLOT_HEADER_BYTES,
    STAMP_MAGIC,
    TOKEN_MAGIC,
    BoundaryHeader,
    Link,
    Poison,
    RingLayout,
    RingReceiver,
    RingSender,
    Stamp,
    TokenHeader,
    check_header,
    counter_word,
    is_at_least,
    pack_dtypes,
    stamp_segment,
)

epochs = st.integers(0, 2**16 - 1)
seqs = st.integers(0, SEQ_MASK)


@given(epochs, st.integers(0, 2**50), st.integers(-(2**40), 2**40))
def test_counters_compare_by_message_number_across_every_wrap(epoch: int, seq: int, distance: int) -> None:
    assert is_at_least(counter_word(epoch, seq + distance), counter_word(epoch, seq)) == (distance >= 0)


@given(epochs, st.integers(1, 2**15 - 1), seqs, seqs)
def test_a_late_store_of_an_older_epoch_satisfies_no_wait_of_a_newer(epoch: int, age: int, late: int, awaited: int) -> None:
    assert not is_at_least(counter_word(epoch, late), counter_word(epoch + age, awaited))


@given(epochs, seqs)
def test_the_next_epoch_s_zero_releases_every_wait(epoch: int, awaited: int) -> None:
    assert is_at_least(counter_word(epoch + 1, 0), counter_word(epoch, awaited))


@given(st.integers(1, 9), st.integers(1, 1000), st.integers(0, 2**50))
def test_slots_do_not_overlap_and_stay_inside_the_segment(num_slots: int, slot_bytes: int, first: int) -> None:
    layout = RingLayout(num_slots, slot_bytes)
    offsets = sorted(layout.slot_offset(seq) for seq in range(first, first + num_slots))
    assert offsets[0] >= CONTROL_BYTES
    ends = [offset + SLOT_HEADER_BYTES + slot_bytes for offset in offsets]
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], layout.segment_bytes], strict=True))
    assert all(offset % 64 == 0 for offset in offsets)


def test_a_ring_has_a_slot() -> None:
    with pytest.raises(ConfigError, match="ring slots 0: must be at least 1"):
        RingLayout(0, 64)


def make_link(epoch: int = 1, num_slots: int = 2, start_seq: int = 0) -> Link:
    layout = RingLayout(num_slots, 64)
    buffer = mmap(-1, layout.segment_bytes)
    stamp_segment(buffer, Stamp(STAMP_MAGIC, epoch, 0, 1, num_slots, 64, start_seq))
    return Link(buffer, MemoryBell(), MemoryBell())


def word_at(link: Link, offset: int) -> int:
    return struct.unpack_from("<Q", link.buffer, offset)[0]


@pytest.mark.parametrize("epoch", [0, 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16])
def test_a_new_ring_is_empty_in_every_epoch(epoch: int) -> None:
    link = make_link(epoch)
    assert not is_at_least(word_at(link, FULL_OFFSET), counter_word(epoch, 1))
    assert is_at_least(word_at(link, FREE_OFFSET), counter_word(epoch, 0))
    assert not is_at_least(word_at(link, FREE_OFFSET), counter_word(epoch, 1))


def test_credits_come_back_in_message_order() -> None:
    link = make_link(num_slots=3)
    receiver = RingReceiver(link, Poison())
    first, second, third = (receiver.claim() for _ in range(3))
    receiver.release(third)
    receiver.release(second)
    assert word_at(link, FREE_OFFSET) == counter_word(1, 0)
    receiver.release(first)
    assert word_at(link, FREE_OFFSET) == counter_word(1, 3)
    receiver.close()


def test_both_ends_agree_on_a_message() -> None:
    link = make_link(epoch=9, start_seq=SEQ_MASK)
    poison = Poison()
    sender, receiver = RingSender(link, poison), RingReceiver(link, poison)
    for step_id in range(5):  # over the wrap of the sequence
        seq = sender.claim()
        assert receiver.claim() == seq
        header = TokenHeader(TOKEN_MAGIC, 9, step_id, seq & SEQ_MASK, 1, 1, 1)
        sender.wait_free(seq)
        sender.publish(seq, header)
        receiver.wait_full(seq, header)
        receiver.release(seq)
    sender.close()
    receiver.close()


HEADER = BoundaryHeader(
    magic=7, epoch=1, step_id=5, seq=4, rows=3, dtype=pack_dtypes(["float32"]), width=8, in_flight=2, schema=99, verdict=1
)


@pytest.mark.parametrize(
    "field", [name for name in BoundaryHeader._fields if name not in ("verdict", "dtype", "magic", "schema")]
)
def test_a_mismatch_names_field_and_both_sides(field: str) -> None:
    got = HEADER._replace(**{field: 1000})
    with pytest.raises(HeaderMismatch) as info:
        check_header(HEADER, got, receiver=1, sender=0)
    assert str(info.value) == f"step 5: header field {field}: rank 1 expected {getattr(HEADER, field)}, rank 0 sent 1000"


def test_a_dtype_mismatch_names_the_dtypes() -> None:
    got = HEADER._replace(dtype=pack_dtypes(["bfloat16", "float16"]))
    with pytest.raises(HeaderMismatch, match="rank 1 expected float32, rank 0 sent bfloat16\\+float16"):
        check_header(HEADER, got, receiver=1, sender=0)


def test_a_verdict_seen_upstream_comes_before_any_field() -> None:
    with pytest.raises(HeaderMismatch, match="step 5: rank 0 reports a header mismatch"):
        check_header(HEADER, HEADER._replace(verdict=0, rows=0), receiver=1, sender=0)


def test_the_first_cause_of_a_poison_stays() -> None:
    poison = Poison()
    woken: list[str] = []
    poison.watch(lambda: woken.append("before"))
    first = RuntimeError("first")
    poison.set(first)
    poison.set(RuntimeError("second"))
    poison.watch(lambda: woken.append("after"))
    assert woken == ["before", "after"]
    with pytest.raises(RuntimeError) as info:
        poison.check()
    assert info.value is first
