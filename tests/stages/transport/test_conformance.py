"""What every transport promises, run against each of them."""

import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from stages.device import HostPoint, HostStream, Point
from stages.errors import HeaderMismatch, PeerLost, TransportError
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors
from stages.transport.boundary import BoundaryTransport
from stages.transport.links import RankLinks
from stages.transport.ring import SEQ_MASK, counter_word, pack_header
from tests.stages.transport.harness import (
    BUFFERING_KINDS,
    DEADLINE_SECONDS,
    GROUP_KINDS,
    HIDDEN,
    HOST_KINDS,
    KINDS,
    MAX_ROWS,
    RING_KINDS,
    SEVERAL,
    Rank,
    assert_same,
    boundary_link,
    build_rank,
    compute_for,
    full_word,
    links_for,
    open_fds,
    pipeline,
    reach,
    sizes_for,
    tensors_of,
    wait_for_sleeper,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=BUFFERING_KINDS)
def buffering_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=RING_KINDS)
def ring_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Stops a stream until set; set at the end, so that no test can leave a stream stopped."""
    event = threading.Event()
    yield event
    event.set()


def look_again(rank: Rank, what: str) -> None:
    """Have what waits look at its counter once more, until it waits again; a stream of a GPU looks all the time."""
    if isinstance(rank.links, RankLinks):
        link = boundary_link(rank.links)
        (link.full_bell if what == "recv" else link.free_bell).ring()
        wait_for_sleeper(rank, what)


class Checker:
    """Compares what arrives with what must have been sent, on the compute stream; the copies are taken at that time."""

    def __init__(self, rank: Rank, boundary: list[TensorSchema] = HIDDEN) -> None:
        self._rank = rank
        self._boundary = boundary

    def recv(self, step_id: int, num_rows: int) -> IntermediateTensors:
        received = self._rank.recv()
        expected = tensors_of(self._boundary, step_id, num_rows)
        self._rank.compute.launch(lambda: assert_same(received.tensors, expected))
        return received


# ---- order and content --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", [HIDDEN, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("ring_slots", [1, 3])
def test_thousands_of_steps_arrive_in_order_and_whole(kind: str, boundary: list[TensorSchema], ring_slots: int) -> None:
    rng = random.Random(ring_slots)
    with pipeline(kind, 2, [boundary], ring_slots=ring_slots) as (first, last):
        checker = Checker(last, boundary)
        in_flight: deque[IntermediateTensors] = deque()
        for step_id in range(500 if kind in GROUP_KINDS else 2000):  # which take several threads for a message
            num_rows = rng.choice([0, 1, rng.randint(0, MAX_ROWS), MAX_ROWS])
            first.begin(step_id, num_rows)
            last.begin(step_id, num_rows)
            sent = first.send(tensors_of(boundary, step_id, num_rows))
            received = checker.recv(step_id, num_rows)
            received.release(last.compute)
            in_flight.append(received)
            if len(in_flight) > 8:
                reach(in_flight.popleft().ready)
        reach(sent)
        reach(last.compute.record())


def test_a_chain_of_three_with_tokens_going_back(kind: str) -> None:
    rng = random.Random(3)
    with pipeline(kind, 3) as ranks:
        first, middle, last = ranks
        outputs = [torch.empty(MAX_ROWS, 8) for _ in range(2)]
        free = [middle.compute.record() for _ in outputs]

        def forward(received: IntermediateTensors, output: torch.Tensor) -> Callable[[], None]:
            return lambda: void(torch.add(received["hidden_states"], 1, out=output))

        points = deque()
        for step_id in range(200 if kind in GROUP_KINDS else 600):
            num_rows = rng.randint(0, MAX_ROWS)
            for rank in ranks:
                rank.begin(step_id, num_rows)
            first.send(tensors_of(HIDDEN, step_id, num_rows))

            received = middle.recv()
            output = outputs[step_id % 2][:num_rows]
            middle.compute.wait(free[step_id % 2])
            middle.compute.launch(forward(received, output))
            received.release(middle.compute)
            free[step_id % 2] = middle.send({"hidden_states": output})

            received = last.recv()
            expected = {"hidden_states": tensors_of(HIDDEN, step_id, num_rows)["hidden_states"] + 1}
            last.compute.launch(lambda received=received, expected=expected: assert_same(received.tensors, expected))
            received.release(last.compute)
            counts = torch.ones(2, dtype=torch.int32)
            last.handler.maybe_broadcast_sampled_tokens(torch.full((2, 1), step_id), counts, counts)

            for rank in (first, middle):
                tokens = rank.handler.maybe_receive_sampled_tokens(2)
                assert tokens is not None
                points.append((step_id, tokens))
            while len(points) > 6:
                sent_id, tokens = points.popleft()
                reach(tokens.ready)
                assert tokens.sampled_token_ids.tolist() == [[sent_id]] * 2
        for rank in ranks:
            reach(rank.compute.record())


def void(_: object) -> None:
    pass


def test_received_tensors_are_views_of_the_slot_and_persistent_ones_are_copies(kind: str) -> None:
    with pipeline(kind, 2, ring_slots=2) as (first, last):
        addresses: list[int] = []
        for step_id in range(4):
            first.begin(step_id, 2)
            last.begin(step_id, 2)
            first.send(tensors_of(HIDDEN, step_id, 2))
            received = last.recv()
            addresses.append(received["hidden_states"].data_ptr())
            received.release(last.compute)
        assert addresses[:2] == addresses[2:]
        assert addresses[0] != addresses[1]

    persistent = {schema.name: torch.empty(MAX_ROWS, schema.width, dtype=getattr(torch, schema.dtype)) for schema in SEVERAL}
    with pipeline(kind, 2, [SEVERAL], ring_slots=2, persistent=persistent) as (first, last):
        checker = Checker(last, SEVERAL)
        for step_id in range(7):  # nobody releases: the copy gives the credit back
            first.begin(step_id, step_id)
            last.begin(step_id, step_id)
            sent = first.send(tensors_of(SEVERAL, step_id, step_id))
            received = checker.recv(step_id, step_id)
            assert received["residual"].data_ptr() == persistent["residual"].data_ptr() or step_id == 0
        reach(sent)
        reach(last.compute.record())


def test_what_is_sent_need_not_be_contiguous(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        first.begin(0, 5)
        last.begin(0, 5)
        whole = torch.arange(80.0).view(5, 16)
        first.send({"hidden_states": whole[:, ::2]})
        received = last.recv()
        reach(received.ready)
        assert torch.equal(received["hidden_states"], whole[:, ::2])


# ---- buffers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring_slots", [1, 2, 4])
def test_a_delayed_receiver_stops_the_sender_at_exactly_k_slots(kind: str, ring_slots: int, gate: threading.Event) -> None:
    num_steps = ring_slots + 2
    with pipeline(kind, 2, ring_slots=ring_slots) as (first, last):
        last.compute.launch(lambda: void(gate.wait()))
        checker = Checker(last)
        sent = []
        for step_id in range(num_steps):
            first.begin(step_id, 4)
            last.begin(step_id, 4)
            sent.append(first.send(tensors_of(HIDDEN, step_id, 4)))
            checker.recv(step_id, 4).release(last.compute)
        reach(sent[ring_slots - 1])
        wait_for_sleeper(first, "send")
        assert [point.is_reached() for point in sent] == [True] * ring_slots + [False] * 2
        gate.set()
        reach(sent[-1])
        reach(last.compute.record())


def test_a_credit_given_out_of_order_waits_for_the_earlier_one(buffering_kind: str) -> None:
    with pipeline(buffering_kind, 2, ring_slots=2) as (first, last):
        sent, received = [], []
        for step_id in range(3):
            first.begin(step_id, 1)
            sent.append(first.send(tensors_of(HIDDEN, step_id, 1)))
            if step_id < 2:
                last.begin(step_id, 1)
                received.append(last.recv())
        reach(received[1].ready)
        wait_for_sleeper(first, "send")
        received[1].release(last.compute)
        reach(last.compute.record())
        look_again(first, "send")  # the sender goes back to sleep: slot 0 is still read
        assert not sent[2].is_reached()
        assert_same(received[0].tensors, tensors_of(HIDDEN, 0, 1))
        received[0].release(last.compute)
        reach(sent[2])


def test_a_credit_may_be_given_while_the_next_message_is_waited_for(buffering_kind: str) -> None:
    with pipeline(buffering_kind, 2, ring_slots=1) as (first, last):
        for step_id in range(2):
            first.begin(step_id, 1)
            first.send(tensors_of(HIDDEN, step_id, 1))
        last.begin(0, 1)
        one = last.recv()
        last.begin(1, 1)
        other = last.recv()
        reach(one.ready)
        reader = compute_for(last.links, "reader")
        one.release(reader)
        reach(other.ready)
        assert_same(other.tensors, tensors_of(HIDDEN, 1, 1))
        last.transport.close()
        reader.close()


def test_a_credit_is_given_once(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        first.begin(0)
        last.begin(0)
        first.send(tensors_of(HIDDEN, 0, 1))
        received = last.recv()
        received.release(last.compute)
        with pytest.raises(RuntimeError, match="message 0 was released twice"):
            received.release(last.compute)


def test_dropped_references_are_kept_until_they_are_sent(kind: str, gate: threading.Event) -> None:
    with pipeline(kind, 2, ring_slots=2) as (first, last):
        last.compute.launch(lambda: void(gate.wait()))
        checker = Checker(last)
        for step_id in range(50):
            first.begin(step_id, MAX_ROWS)
            last.begin(step_id, MAX_ROWS)
            first.send(tensors_of(HIDDEN, step_id, MAX_ROWS))
            checker.recv(step_id, MAX_ROWS).release(last.compute)
            gc.collect(0)
            void([torch.full((MAX_ROWS, 8), -1.0) for _ in range(4)])  # takes up memory that was freed too early
        gate.set()
        reach(last.compute.record())


def test_a_source_may_be_overwritten_after_its_point_and_not_before(kind: str, gate: threading.Event) -> None:
    with pipeline(kind, 2, ring_slots=1) as (first, last):
        last.compute.launch(lambda: void(gate.wait()))
        checker = Checker(last)
        source = torch.empty(MAX_ROWS, 8)
        overwritten = []
        for step_id in range(6):
            first.begin(step_id, MAX_ROWS)
            last.begin(step_id, MAX_ROWS)
            values = tensors_of(HIDDEN, step_id, MAX_ROWS)["hidden_states"]
            first.compute.launch(lambda values=values: void(source.copy_(values)))
            point = first.send({"hidden_states": source})
            first.compute.wait(point)
            overwritten.append(first.compute.record())
            checker.recv(step_id, MAX_ROWS).release(last.compute)
        reach(overwritten[0])
        wait_for_sleeper(first, "send")
        assert not overwritten[1].is_reached()
        gate.set()
        reach(last.compute.record())


def test_sending_waits_for_the_source_to_be_ready(kind: str, gate: threading.Event) -> None:
    with pipeline(kind, 2) as (first, last):
        first.begin(0, 1)
        last.begin(0, 1)
        source = torch.zeros(1, 8)
        first.compute.launch(lambda: void(gate.wait()))
        first.compute.launch(lambda: void(source.fill_(5)))
        first.send({"hidden_states": source})
        received = last.recv()
        wait_for_sleeper(last, "recv")
        assert not received.ready.is_reached()
        gate.set()
        reach(received.ready)
        assert torch.equal(received["hidden_states"], torch.full((1, 8), 5.0))


def test_more_rows_than_a_slot_holds_are_refused(kind: str) -> None:
    with pipeline(kind, 2) as (first, _), pytest.raises(TransportError, match="step 7: 33 rows, but a ring slot holds 32"):
        first.begin(7, MAX_ROWS + 1)


def test_tensors_that_were_not_agreed_are_refused_before_anything_is_sent(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        first.begin(0, 2)
        last.begin(0, 2)
        for wrong, message in [
            ({"residual": torch.zeros(2, 8)}, "boundary tensor hidden_states is missing, got residual"),
            ({"hidden_states": torch.zeros(3, 8)}, r"hidden_states: torch.float32 \(3, 8\), must be torch.float32 \(2, 8\)"),
            ({"hidden_states": torch.zeros(2, 8, dtype=torch.bfloat16)}, r"hidden_states: torch.bfloat16 \(2, 8\), must be"),
        ]:
            with pytest.raises(TransportError, match=message):
                first.send(wrong)
        first.send(tensors_of(HIDDEN, 0, 2))
        received = Checker(last).recv(0, 2)
        reach(received.ready)
        reach(last.compute.record())


def test_the_ends_of_the_pipeline_have_no_further_peer(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        with pytest.raises(ValueError, match="no step was announced"):
            last.recv()
        first.begin(0)
        last.begin(0)
        with pytest.raises(ValueError, match="rank 0 receives from no rank"):
            first.recv()
        with pytest.raises(ValueError, match="rank 1 is the last of 2 and sends to no rank"):
            last.send(tensors_of(HIDDEN, 0, 1))
        with pytest.raises(ValueError, match="was called with"):
            first.transport.recv(PPGroup(0, 2, epoch=2))


# ---- counters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 2**15 - 1, 2**16 - 1])
@pytest.mark.parametrize("ring_slots", [1, 3])
def test_the_sequence_wraps(kind: str, epoch: int, ring_slots: int) -> None:
    with pipeline(kind, 2, epochs=[epoch], ring_slots=ring_slots, start_seq=SEQ_MASK - 5) as (first, last):
        checker = Checker(last)
        for step_id in range(20):
            first.begin(step_id, 3)
            last.begin(step_id, 3)
            first.send(tensors_of(HIDDEN, step_id, 3))
            checker.recv(step_id, 3).release(last.compute)
        reach(last.compute.record())


def test_a_late_store_of_an_older_epoch_is_no_message(ring_kind: str) -> None:
    with pipeline(ring_kind, 2, epochs=[5]) as (first, last):
        last.begin(0, 1)
        first.begin(0, 1)
        full_word(last)[0] = counter_word(4, 1000)
        received = last.recv()
        wait_for_sleeper(last, "recv")
        look_again(last, "recv")
        assert not received.ready.is_reached()
        first.send(tensors_of(HIDDEN, 0, 1))
        reach(received.ready)


# ---- headers ------------------------------------------------------------------------------------------------------------

WIDER = [TensorSchema("hidden_states", "float32", 9)]
HALF = [TensorSchema("hidden_states", "float16", 8)]
RENAMED = [TensorSchema("residual", "float32", 8)]


@pytest.mark.parametrize(
    ("field", "sent", "expected", "boundary", "changed"),
    [
        ("step_id", (8, 2, 1), (7, 2, 1), HIDDEN, {}),
        ("rows", (7, 3, 1), (7, 2, 1), HIDDEN, {}),
        ("rows", (7, 2, 1), (7, 3, 1), HIDDEN, {}),
        ("in_flight", (7, 2, 2), (7, 2, 1), HIDDEN, {}),
        ("width", (7, 2, 1), (7, 2, 1), WIDER, {}),
        ("dtype", (7, 2, 1), (7, 2, 1), HALF, {}),
        ("schema", (7, 2, 1), (7, 2, 1), RENAMED, {}),
        ("seq", (7, 2, 1), (7, 2, 1), HIDDEN, {"seq": 1}),
        ("magic", (7, 2, 1), (7, 2, 1), HIDDEN, {"magic": 7}),
        ("epoch", (7, 2, 1), (7, 2, 1), HIDDEN, {"epoch": 2}),
    ],
)
def test_a_header_mismatch_names_the_field_and_both_ranks(
    kind: str,
    field: str,
    sent: tuple[int, int, int],
    expected: tuple[int, int, int],
    boundary: list[TensorSchema],
    changed: dict[str, int],
) -> None:
    with pipeline(kind, 2, [boundary, HIDDEN]) as (first, last):
        change_headers(first, changed)
        first.begin(*sent)
        last.begin(*expected)
        delivered = first.send(tensors_of(boundary, sent[0], sent[1]))
        received = last.recv()
        with pytest.raises(HeaderMismatch, match=rf"step 7: header field {field}: rank 1 expected .*, rank 0 sent ") as info:
            reach(received.ready)
        assert "\n" not in str(info.value)
        with pytest.raises(HeaderMismatch):  # sticky: nothing later of this rank may be believed
            reach(last.compute.record())
        reach(delivered)


def change_headers(rank: Rank, changed: dict[str, int]) -> None:
    """Of the messages that it sends."""
    transport = rank.transport
    assert isinstance(transport, BoundaryTransport)
    make = transport._header
    transport._header = lambda step, seq: make(step, seq)._replace(**changed)
    transport._header_bytes = lambda step, seq: pack_header(transport._header(step, seq))


def test_a_mismatch_reaches_every_rank_behind_it_and_the_token_messages(kind: str) -> None:
    with pipeline(kind, 3, token_slots=2) as (first, middle, last):
        first.begin(1, 2)
        middle.begin(1, 1)
        last.begin(1, 2)
        first.send(tensors_of(HIDDEN, 1, 2))
        sent = middle.send({"hidden_states": middle.recv()["hidden_states"]})
        received = last.recv()
        counts = torch.ones(1, dtype=torch.int32)
        broadcast = last.handler.maybe_broadcast_sampled_tokens(torch.zeros(1, 1, dtype=torch.int64), counts, counts)
        tokens, _ = (rank.handler.maybe_receive_sampled_tokens(1) for rank in (first, middle))
        assert broadcast is not None
        assert tokens is not None
        with pytest.raises(HeaderMismatch, match="step 1: header field rows: rank 1 expected 1, rank 0 sent 2"):
            reach(sent)
        with pytest.raises(HeaderMismatch, match="step 1: rank 1 reports a header mismatch"):
            reach(received.ready)
        with pytest.raises(HeaderMismatch, match="step 1: rank 1 reports a header mismatch"):
            reach(broadcast)
        with pytest.raises(HeaderMismatch, match="step 1: rank 2 reports a header mismatch"):
            reach(tokens.ready)


# ---- ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ends_close_in_either_order_and_lose_nothing(kind: str, order: tuple[int, int]) -> None:
    ranks = links_and_ranks(kind)
    first, last = ranks
    first.begin(0, 4)
    last.begin(0, 4)
    sent = first.send(tensors_of(HIDDEN, 0, 4))
    closer = threading.Thread(target=first.close)  # waits where a message does not outlive its sender
    if order == (0, 1):
        closer.start()
    received = Checker(last).recv(0, 4)
    received.release(last.compute)
    reach(last.compute.record())
    reach(sent)
    if order == (0, 1):
        closer.join(DEADLINE_SECONDS)
    for rank in order:
        ranks[rank].transport.close()
        ranks[rank].close()
        ranks[rank].poison(RuntimeError("late"))  # after the end: nothing happens
        with pytest.raises(TransportError, match="closed"):
            ranks[rank].transport.begin_step(None)  # pyright: ignore[reportArgumentType]


def links_and_ranks(kind: str) -> list[Rank]:
    links = links_for(kind, 2, sizes_for(HIDDEN, 2, 2), epoch=1, start_seq=0)
    return [build_rank(kind, PPGroup(rank, 2, 1), links[rank]) for rank in range(2)]


@pytest.mark.parametrize("host_kind", HOST_KINDS)
def test_a_view_may_outlive_its_transport(host_kind: str) -> None:
    ranks = links_and_ranks(host_kind)
    first, last = ranks
    first.begin(0, 4)
    last.begin(0, 4)
    first.send(tensors_of(HIDDEN, 0, 4))
    received = last.recv()
    reach(received.ready)
    for rank in ranks:
        rank.poison(PeerLost("the epoch was ended"))
        rank.close()
    received.release(last.compute)  # gives no credit, and reaches no closed link
    assert_same(received.tensors, tensors_of(HIDDEN, 0, 4))


class StoppedStream(HostStream):
    """Runs nothing before ``gate`` is set, and tells when somebody waits for one of its Points."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__("stopped")
        self.is_awaited = threading.Event()
        self.launch(lambda: void(gate.wait()))

    def record(self, *, is_told: bool = True) -> HostPoint:
        point = super().record(is_told=is_told)
        add_done_callback = point.add_done_callback

        def spied(fn: Callable[[], None]) -> None:
            add_done_callback(fn)
            self.is_awaited.set()

        return SpiedPoint(point, spied)  # pyright: ignore[reportReturnType]


@dataclass
class SpiedPoint:
    point: HostPoint
    add_done_callback: Callable[[Callable[[], None]], None]


@pytest.mark.parametrize("host_kind", HOST_KINDS)
def test_closing_waits_for_credits_that_other_streams_still_give(host_kind: str, gate: threading.Event) -> None:
    first, last = links_and_ranks(host_kind)
    first.begin(0)
    last.begin(0)
    first.send(tensors_of(HIDDEN, 0, 1))
    received = last.recv()
    reach(received.ready)
    reader = StoppedStream(gate)
    received.release(reader)
    closer = threading.Thread(target=last.transport.close)
    closer.start()
    assert reader.is_awaited.wait(DEADLINE_SECONDS)
    assert boundary_link(last.links).buffer
    gate.set()
    closer.join(DEADLINE_SECONDS)
    reach(HostStream.record(reader))  # the credit was given to a link that was still open
    with pytest.raises(TransportError, match="the link from rank 0 to rank 1 is closed"):
        assert boundary_link(last.links).buffer
    reader.close()
    for rank in (first, last):
        rank.close()


@pytest.mark.parametrize("host_kind", HOST_KINDS)
def test_a_kept_error_keeps_no_segment(host_kind: str) -> None:
    before = open_fds()
    cause = PeerLost("the epoch was ended")
    ranks = links_and_ranks(host_kind)
    first, last = ranks
    last.begin(0)
    last.recv()
    counts = torch.ones(1, dtype=torch.int32)
    for step_id in range(3):  # a ring of two slots: the third waits for a credit
        first.begin(step_id)
        first.send(tensors_of(HIDDEN, step_id, 1))
        last.handler.begin_step(step_id)
        last.handler.maybe_broadcast_sampled_tokens(torch.zeros(1, 1, dtype=torch.int64), counts, counts)
    first.handler.maybe_receive_sampled_tokens(1)
    wait_for_sleeper(first, "send")
    wait_for_sleeper(last, "tokens")
    for rank in ranks:
        rank.poison(cause)
        rank.close()
    assert cause.__traceback__ is not None
    assert open_fds() == before


def block_recv(first: Rank, last: Rank) -> tuple[Rank, Point, str]:
    last.begin(0)
    return last, last.recv().ready, "recv"


def block_credit(first: Rank, last: Rank) -> tuple[Rank, Point, str]:
    for step_id in range(4):
        first.begin(step_id)
        point = first.send(tensors_of(HIDDEN, step_id, 1))
    return first, point, "send"


def block_tokens(first: Rank, last: Rank) -> tuple[Rank, Point, str]:
    first.begin(0)
    tokens = first.handler.maybe_receive_sampled_tokens(1)
    assert tokens is not None
    return first, tokens.ready, "tokens"


def block_broadcast(first: Rank, last: Rank) -> tuple[Rank, Point, str]:
    counts = torch.ones(1, dtype=torch.int32)
    for step_id in range(5):
        last.begin(step_id)
        point = last.handler.maybe_broadcast_sampled_tokens(torch.zeros(1, 1, dtype=torch.int64), counts, counts)
    assert point is not None
    return last, point, "tokens"


@pytest.mark.parametrize("block", [block_recv, block_credit, block_tokens, block_broadcast])
def test_poison_breaks_every_wait_at_once_and_for_good(kind: str, block: Callable[..., tuple]) -> None:
    cause = PeerLost("rank 1 is gone: exit code -9")
    with pipeline(kind, 2) as (first, last):
        rank, point, what = block(first, last)
        wait_for_sleeper(rank, what)
        assert not point.is_reached()
        poisoner = threading.Thread(target=rank.poison, args=(cause,))
        poisoner.start()
        with pytest.raises(PeerLost) as info:
            reach(point)
        assert str(info.value).startswith(str(cause))
        poisoner.join()
        with pytest.raises(PeerLost):
            rank.transport.begin_step(None)  # pyright: ignore[reportArgumentType]
        with pytest.raises(PeerLost):
            rank.handler.begin_step(9)


@pytest.mark.parametrize("what", ["send", "broadcast"])
def test_poison_breaks_the_wait_for_our_own_compute(kind: str, what: str, gate: threading.Event) -> None:
    with pipeline(kind, 2) as (first, last):
        rank = first if what == "send" else last
        rank.compute.launch(lambda: void(gate.wait()))
        rank.begin(0)
        counts = torch.ones(1, dtype=torch.int32)
        if what == "send":
            point = rank.send(tensors_of(HIDDEN, 0, 1))
        else:
            point = rank.handler.maybe_broadcast_sampled_tokens(torch.zeros(1, 1, dtype=torch.int64), counts, counts)
        assert point is not None
        rank.poison(PeerLost("the epoch was ended"))
        with pytest.raises(PeerLost):
            reach(point)
        gate.set()  # HostLane.close waits for compute


def test_poison_before_anything_was_enqueued(kind: str) -> None:
    with pipeline(kind, 2) as (_, last):
        last.begin(0)
        last.poison(PeerLost("first"))
        last.poison(PeerLost("second"))
        with pytest.raises(PeerLost, match="first"):
            last.recv()


def test_poison_is_local(ring_kind: str) -> None:
    with pipeline(ring_kind, 2) as (first, last):
        last.poison(PeerLost("the epoch was ended"))
        first.begin(0)
        reach(first.send(tensors_of(HIDDEN, 0, 1)))  # the peer goes on


def test_a_failed_compute_stream_fails_the_send_with_the_same_error(kind: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the forward")

    with pipeline(kind, 2) as (first, last):
        first.begin(0)
        last.begin(0)
        last.recv()
        first.compute.launch(fail)
        with pytest.raises(ZeroDivisionError, match="of the forward"):
            reach(first.send(tensors_of(HIDDEN, 0, 1)))


def test_a_blocked_pipeline_burns_no_cpu(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        for block in (block_recv, block_tokens):
            rank, point, what = block(first, last)
            wait_for_sleeper(rank, what)
        started = time.process_time()
        time.sleep(0.5)  # the measurement itself: CPU time of half a second in which all threads are blocked
        used = time.process_time() - started
        assert not point.is_reached()
        assert used < 0.05
