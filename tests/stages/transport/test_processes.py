"""Transports between processes, and for ``shared_memory`` either of them killed."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import pytest
import torch

from stages.errors import PeerLost
from stages.topology import PPGroup
from stages.transport.links import RankLinks, create_links_for, shared_links_from_fds
from tests.stages.transport.harness import HIDDEN, Rank, SpyBell, boundary_link, build_rank, reach, tensors_of
from tests.stages.transport.peer import RING_SLOTS, SIZES, links_over, num_rows, receive, send


def lost() -> PeerLost:
    return PeerLost("the peer is gone: killed by signal 9")


@dataclass
class Peer:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    lines: TextIO

    def expect(self, line: str) -> None:
        assert self.lines.readline() == line + "\n"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL

    def finish(self) -> None:
        self.channel.sendall(b".")
        assert self.process.wait(30) == 0


@contextmanager
def peer_process(rank: int, what: str, count: int, kind: str = "shared_memory", epoch: int = 1) -> Iterator[tuple[Rank, Peer]]:
    """The other rank in a process of its own, and ours; ``count`` 0 lets it run for ever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        arguments = [kind, rank, epoch, theirs.fileno(), what, count]
        command = [sys.executable, "-m", "tests.stages.transport.peer", *map(str, arguments)]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            group = PPGroup(1 - rank, 2, epoch)
            local = build_rank(
                kind, group, shared_links(ours, rank) if kind == "shared_memory" else links_over(ours, kind, group)
            )
            with ours.makefile("r") as lines:
                peer = Peer(process, ours, lines)
                try:
                    peer.expect("ready")
                    yield local, peer
                finally:
                    local.poison(lost())
                    local.close()
        finally:
            process.kill()
            process.wait()


def shared_links(channel: socket.socket, rank: int) -> RankLinks:
    """The links of the two ranks, of which those of ``rank`` go through ``channel``."""
    fds = create_links_for(2, SIZES, epoch=1)
    socket.send_fds(channel, [b"links"], fds[rank])
    for fd in fds[rank]:
        os.close(fd)
    return shared_links_from_fds(fds[1 - rank], PPGroup(1 - rank, 2, epoch=1), SIZES)


def spy(bell: object) -> SpyBell:
    assert isinstance(bell, SpyBell)
    return bell


KINDS = ["shared_memory", "gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_steps_there_and_back(kind: str) -> None:
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    with peer_process(1, "echo", 1000, kind) as (first, peer):
        for step_id in range(1000):
            first.begin(step_id, 1)
            values = tensors_of(HIDDEN, step_id, 1)
            first.send({name: tensor.to("cuda" if kind == "nccl" else "cpu") for name, tensor in values.items()})
            tokens = first.handler.maybe_receive_sampled_tokens(1)
            assert tokens is not None
            reach(tokens.ready)
            assert tokens.sampled_token_ids.item() == int(values["hidden_states"].sum())
        peer.expect("done")
        peer.finish()


def test_the_sender_is_killed_while_it_sends() -> None:
    with peer_process(0, "send", 0) as (last, peer):
        for step_id in range(200):
            receive(last, step_id)
        peer.kill()
        received = []
        for step_id in range(200, 200 + RING_SLOTS + 1):  # what had been published is whole, and then there is no more
            last.begin(step_id, num_rows(step_id))
            received.append(last.recv())
        tokens_waits = last.handler.maybe_broadcast_sampled_tokens(
            torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        )
        spy(boundary_link(last.links).full_bell).wait_for_sleeper()
        last.poison(lost())
        with pytest.raises(PeerLost, match="killed by signal 9"):
            reach(received[-1].ready)
        assert tokens_waits is not None
        with pytest.raises(PeerLost):
            reach(tokens_waits)


def test_the_receiver_is_killed_while_it_holds_every_slot() -> None:
    with peer_process(1, "receive", 3) as (first, peer):
        for step_id in range(3):
            send(first, step_id)
        peer.expect("done")
        peer.kill()
        first.begin(3, 4)
        sent = [first.send(tensors_of(HIDDEN, 3, 4)) for _ in range(RING_SLOTS + 1)]
        tokens = first.handler.maybe_receive_sampled_tokens(1)
        reach(sent[RING_SLOTS - 1])  # into the dead peer's slots: no error
        spy(boundary_link(first.links).free_bell).wait_for_sleeper()
        assert not sent[-1].is_reached()
        first.poison(lost())
        with pytest.raises(PeerLost):
            reach(sent[-1])
        assert tokens is not None
        with pytest.raises(PeerLost):
            reach(tokens.ready)


def test_the_receiver_is_killed_while_it_receives() -> None:
    with peer_process(1, "receive", 0) as (first, peer):
        for step_id in range(200):
            send(first, step_id)
        peer.kill()
        first.begin(200, 4)
        sent = [first.send(tensors_of(HIDDEN, 200, 4)) for _ in range(RING_SLOTS + 1)]
        first.poison(lost())
        with pytest.raises(PeerLost):
            reach(sent[-1])
