"""A rank in a process of its own: ``python -m tests.stages.transport.peer <rank> <socket fd> <what> <number of steps>``.

It is sent its links' descriptors over the socket, as the engine would send them, and tells over it how far it is.
"""

import itertools
import os
import signal
import socket
import sys

import torch

from stages.topology import PPGroup
from stages.transport.links import shared_links_from_fds
from tests.stages.transport.harness import HIDDEN, MAX_ROWS, Rank, assert_same, build_rank, reach, sizes_for, tensors_of

RING_SLOTS = 2
SIZES = sizes_for(HIDDEN, RING_SLOTS, 4)


def num_rows(step_id: int) -> int:
    return step_id * 5 % (MAX_ROWS + 1)


def send(rank: Rank, step_id: int) -> None:
    rank.begin(step_id, num_rows(step_id))
    reach(rank.send(tensors_of(HIDDEN, step_id, num_rows(step_id))))


def receive(rank: Rank, step_id: int) -> None:
    rank.begin(step_id, num_rows(step_id))
    received = rank.recv()
    reach(received.ready)
    assert_same(received.tensors, tensors_of(HIDDEN, step_id, num_rows(step_id)))
    received.release(rank.compute)
    reach(rank.compute.record())


def echo_tokens(rank: Rank, step_id: int) -> None:
    """The last rank's whole step: what it received goes back as tokens, one request for each row."""
    rank.begin(step_id, 1)
    received = rank.recv()
    ids = torch.empty(1, 1, dtype=torch.int64)

    def sample() -> None:
        ids.fill_(int(received["hidden_states"].sum()))

    rank.compute.launch(sample)
    received.release(rank.compute)
    ones = torch.ones(1, dtype=torch.int32)
    sent = rank.handler.maybe_broadcast_sampled_tokens(ids, ones, ones)
    assert sent is not None
    reach(sent)


def main() -> None:
    rank_number, fd, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    channel = socket.socket(fileno=fd)
    message, fds, _, _ = socket.recv_fds(channel, 64, 64)
    assert message == b"links"
    group = PPGroup(rank_number, 2, epoch=1)
    rank = build_rank("shared_memory", group, shared_links_from_fds(fds, group, SIZES))
    step = {"send": send, "receive": receive, "echo": echo_tokens}[what]
    channel.sendall(b"ready\n")
    count = int(sys.argv[4])
    for step_id in range(count) if count else itertools.count():
        step(rank, step_id)
    channel.sendall(b"done\n")
    channel.recv(1)  # until the parent has seen enough
    rank.close()
    assert len(os.listdir("/proc/self/fd")) == 5, os.listdir("/proc/self/fd")  # three, the channel, and the listing


if __name__ == "__main__":
    signal.alarm(60)  # no orphan when the test process is killed
    main()
