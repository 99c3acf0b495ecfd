"""What is peculiar to process groups: making them, peers that die or stop, and headers that only a device compares."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stages.device import Point
from stages.errors import HeaderMismatch, PeerLost, TransportError
from stages.plan import Offer
from stages.topology import PPGroup
from stages.transport import process_group_gpu
from stages.transport.process_group_backends import GlooGroup, gloo_obstacle, nccl_obstacle
from stages.transport.process_group_links import LOOPBACK, ProcessGroupLinks, address_for
from tests.emulated_cuda import the_emulation
from tests.stages.transport.harness import (
    EMULATED_NCCL,
    GROUP_KINDS,
    HIDDEN,
    Rank,
    assert_same,
    links_for,
    pipeline,
    reach,
    sizes_for,
    tensors_of,
)
from tests.stages.transport.peer import RING_SLOTS, num_rows, receive, send
from tests.stages.transport.test_processes import lost, peer_process

SIZES = sizes_for(HIDDEN, 2, 2)
BREAK_SECONDS = 1.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def broadcast(rank: Rank) -> Point:
    ones = torch.ones(1, dtype=torch.int32)
    point = rank.handler.maybe_broadcast_sampled_tokens(torch.zeros(1, 1, dtype=torch.int64), ones, ones)
    assert point is not None
    return point


def blocked_last(last: Rank, step_id: int) -> list[Point]:
    """A receive that gets nothing, and token messages that nobody takes: one more than there are slots."""
    for step in range(step_id, step_id + RING_SLOTS + 1):  # what had been sent is there
        last.begin(step, num_rows(step))
        received = last.recv()
        received.release(last.compute)
    return [received.ready, [broadcast(last) for _ in range(5)][-1]]


def blocked_first(first: Rank, step_id: int) -> list[Point]:
    first.begin(step_id, 4)
    sent = [first.send(tensors_of(HIDDEN, step_id, 4)) for _ in range(3)]
    tokens = first.handler.maybe_receive_sampled_tokens(1)
    assert tokens is not None
    return [sent[-1], tokens.ready]


def is_reached(point: Point) -> bool:
    try:
        return point.is_reached()
    except PeerLost:
        return True


# ---- peers that are gone ------------------------------------------------------------------------------------------------


def test_a_killed_peer_is_no_error_until_the_engine_says_so_and_another_epoch_works(caplog: pytest.LogCaptureFixture) -> None:
    for victim, what, step, block in ((0, "send", receive, blocked_last), (1, "receive", send, blocked_first)):
        caplog.clear()
        with peer_process(victim, what, 0, "gloo", epoch=1 + victim) as (ours, peer):
            for step_id in range(100):
                step(ours, step_id)
            peer.kill()
            points = block(ours, 100)
            # Nobody yet needs the tokens' connection where compute waits for hidden states.
            wait_for_broken_connections(caplog, 1 if victim == 0 else 2)
            assert not any(is_reached(point) for point in points)
            with within(BREAK_SECONDS):
                ours.poison(lost())
                for point in points:
                    with pytest.raises(PeerLost, match="the peer is gone: killed by signal 9"):
                        reach(point)
                ours.close()


def wait_for_broken_connections(caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Until what waits for the peer has found that it is gone: by the connection's end or, with data on the way, its reset."""
    deadline = time.monotonic() + 30
    while sum("the connection broke" in record.getMessage() for record in caplog.records) < count:
        assert time.monotonic() < deadline, [record.getMessage() for record in caplog.records]
        time.sleep(0.001)


def test_poison_breaks_waits_for_a_stopped_peer() -> None:
    with peer_process(1, "receive", 3, "gloo") as (first, peer):
        for step_id in range(3):
            send(first, step_id)
        peer.process.send_signal(signal.SIGSTOP)
        points = blocked_first(first, 3)
        with within(BREAK_SECONDS):
            first.poison(lost())
            for point in points:
                with pytest.raises(PeerLost):
                    reach(point)
            first.close()


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_epochs_come_and_go_in_one_process(kind: str) -> None:
    for epoch in range(1, 4):
        with pipeline(kind, 3, epochs=[epoch]) as ranks:
            points = []
            for rank in ranks:
                rank.begin(0, 2)
            ranks[0].send(tensors_of(HIDDEN, 0, 2))
            points.append(ranks[1].recv().ready)
            points.append(ranks[2].recv().ready)  # nothing comes
            reach(points[0])
            for rank in ranks:
                rank.poison(PeerLost("the epoch was ended"))
            with pytest.raises(PeerLost, match="the epoch was ended"):
                reach(points[1])


# ---- making them --------------------------------------------------------------------------------------------------------


def test_linking_ends_in_time_without_the_others() -> None:
    links = [ProcessGroupLinks("gloo", PPGroup(rank, 3, 1), SIZES, max_seconds=0.3) for rank in range(2)]
    exports = [each.exports() for each in links]
    with ThreadPoolExecutor(2) as pool, within(5):
        for rank, done in enumerate([pool.submit(each.connect, exports) for each in links]):
            with pytest.raises(TransportError, match=f"rank {rank} cannot link over gloo: .*imed? ?out"):
                done.result()
    for each in links:
        each.close()
        each.close()


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_the_probe_ends_in_time_without_the_others(kind: str) -> None:
    links = links_for(kind, 2, SIZES, epoch=1, start_seq=0)
    assert isinstance(links[0], ProcessGroupLinks)
    with within(5), pytest.raises(TransportError, match="rank 0: a message of the probe did not arrive"):
        links[0].probe(0.3)
    for each in links:
        each.close()


def test_the_probe_finds_what_arrives_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    send = GlooGroup.send

    def damaged(self: GlooGroup, message: torch.Tensor, peer: int, tag: int) -> None:
        message[5] ^= 1
        send(self, message, peer, tag)
        message[5] ^= 1

    monkeypatch.setattr(GlooGroup, "send", damaged)
    with pytest.raises(
        TransportError, match=r"link from rank \d to rank \d: rank \d found 1 of \d+ bytes of the probe changed"
    ):
        links_for("gloo", 2, SIZES, epoch=1, start_seq=0)


def test_the_store_listens_on_this_host_only() -> None:
    links = ProcessGroupLinks("gloo", PPGroup(0, 2, 1), SIZES)
    listening = [address for address in listening_sockets() if address[1] == links._export.port]
    assert listening == [(LOOPBACK, links._export.port)]
    links.close()


def listening_sockets() -> list[tuple[str, int]]:
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    found: list[tuple[str, int]] = []
    for family in ("tcp", "tcp6"):
        with open(f"/proc/net/{family}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    host, port = fields[1].split(":")
                    packed = bytes.fromhex(host)[::-1]
                    found.append((socket.inet_ntoa(packed) if family == "tcp" else host, int(port, 16)))
    return found


def test_nothing_is_made_before_links_are() -> None:
    with pipeline("gloo", 2):
        assert not torch.distributed.is_initialized()


def test_obstacles_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gloo_obstacle() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nccl_obstacle() == "torch finds no GPU"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert gloo_obstacle() == f"torch {torch.__version__} is built without gloo"
    assert address_for([offer("a"), offer("a")]) == LOOPBACK
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert address_for([offer("a"), offer("b")]) == "10.1.2.3"


def offer(host_id: str) -> Offer:
    return Offer(host_id, 1, "cpu", {}, HIDDEN, 0, 1, 1, 0, 0, 0, 0.0, 1, 1, 1, 1, False, 0)


# ---- on GPUs ------------------------------------------------------------------------------------------------------------


def test_a_device_finds_a_header_that_differs_and_tells_every_rank_behind_it() -> None:
    with pipeline(EMULATED_NCCL, 3) as (first, middle, last):
        first.begin(8, 2)
        middle.begin(7, 2)
        last.begin(7, 2)
        sent = first.send(tensors_of(HIDDEN, 8, 2))
        passed_on = middle.send({"hidden_states": middle.recv()["hidden_states"]})
        reach(sent)
        received = last.recv()
        broadcast(last)
        tokens = [rank.handler.maybe_receive_sampled_tokens(1) for rank in (first, middle)]
        with pytest.raises(HeaderMismatch, match="step 7: header field step_id: rank 1 expected 7, rank 0 sent 8"):
            reach(passed_on)
        with pytest.raises(HeaderMismatch, match="step 7: rank 1 reports a header mismatch"):
            reach(received.ready)
        assert tokens[0] is not None
        with pytest.raises(HeaderMismatch):
            reach(tokens[0].ready)
        assert tokens[0].num_sampled.tolist() == [0]


@pytest.mark.parametrize(("sent", "expected"), [(2, 3), (3, 2)])
def test_a_device_finds_a_wrong_size_before_it_waits_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, sent: int, expected: int
) -> None:
    monkeypatch.setattr(process_group_gpu, "HEAD_BYTES", 144)  # a header and two rows and a half
    with pipeline(EMULATED_NCCL, 2) as (first, last):
        first.begin(7, sent)
        last.begin(7, expected)
        first.send(tensors_of(HIDDEN, 7, sent))
        with pytest.raises(HeaderMismatch, match=f"step 7: header field rows: rank 1 expected {expected}, rank 0 sent {sent}"):
            reach(last.recv().ready)


def test_large_messages_come_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group_gpu, "HEAD_BYTES", 144)
    with pipeline(EMULATED_NCCL, 2) as (first, last):
        for step_id in range(100):
            for rank in (first, last):
                rank.begin(step_id, num_rows(step_id))
            first.send(tensors_of(HIDDEN, step_id, num_rows(step_id)))
            received = last.recv()
            reach(received.ready)
            assert_same(received.tensors, tensors_of(HIDDEN, step_id, num_rows(step_id)))
            received.release(last.compute)


def test_on_a_gpu_a_slot_must_be_released_before_it_is_received_into_again() -> None:
    with pipeline(EMULATED_NCCL, 2, ring_slots=2) as (first, last):
        for step_id in range(2):
            for rank in (first, last):
                rank.begin(step_id)
            first.send(tensors_of(HIDDEN, step_id, 1))
            last.recv()
        last.begin(2)
        with pytest.raises(RuntimeError, match="message 0 was not released: there is no slot for message 2"):
            last.recv()


def test_on_a_gpu_nothing_is_enqueued_while_a_graph_is_captured() -> None:
    with pipeline(EMULATED_NCCL, 2) as (first, _):
        first.begin(0)
        handle = first.compute.handle  # pyright: ignore[reportAttributeAccessIssue]
        the_emulation().set_capturing(handle, is_capturing=True)
        try:
            with pytest.raises(TransportError, match="a graph is being captured"):
                first.send(tensors_of(HIDDEN, 0, 1))
            with pytest.raises(TransportError, match="a graph is being captured"):
                first.handler.maybe_receive_sampled_tokens(1)
        finally:
            the_emulation().set_capturing(handle, is_capturing=False)


def test_a_stage_whose_token_receives_wait_on_the_device_sends_first() -> None:
    """One order of operations on all ranks: the hidden states of a step along the pipeline, then its tokens."""
    from stages.stage import Stage

    with pipeline(EMULATED_NCCL, 3) as ranks:
        orders = []
        for rank in ranks:
            parts: dict[str, Any] = {"runner": None, "sampler": None, "outputs": None, "slots": None, "boundary": HIDDEN[0]}
            stage = Stage(group=rank.group, compute=rank.compute, transport=rank.transport, handler=rank.handler, **parts)
            orders.append([operation.kind for operation in stage.operations])
    assert orders == [
        ["forward", "send", "token_receive"],
        ["recv", "forward", "send", "token_receive"],
        ["recv", "forward", "token_broadcast"],
    ]
