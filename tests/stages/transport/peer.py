"""A rank in a process of its own: ``python -m tests.stages.transport.peer KIND RANK EPOCH SOCKET_FD WHAT NUM_STEPS``.

Over the socket it is sent its links' descriptors, as the engine would send them, or tells what they export and is told what
the others do; then it tells how far it is.
"""

import itertools
import os
import signal
import socket
import sys

import torch

from stages.cuda import CudaDevice
from stages.driver import Driver
from stages.kernels import Kernels
from stages.topology import PPGroup
from stages.transport.links import shared_links_from_fds
from stages.transport.process_group_links import GroupGpu, ProcessGroupLinks
from tests.stages.transport.harness import (
    DEADLINE_SECONDS,
    HIDDEN,
    MAX_ROWS,
    Links,
    Rank,
    assert_same,
    build_rank,
    reach,
    sizes_for,
    tensors_of,
)

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
    device = received["hidden_states"].device
    ids = torch.empty(1, 1, dtype=torch.int64, device=device)

    def sample() -> None:
        ids.copy_(received["hidden_states"].sum())

    rank.compute.launch(sample)
    received.release(rank.compute)
    ones = torch.ones(1, dtype=torch.int32, device=device)
    sent = rank.handler.maybe_broadcast_sampled_tokens(ids, ones, ones)
    assert sent is not None
    reach(sent)


def links_over(channel: socket.socket, kind: str, group: PPGroup) -> Links:
    """Our links, connected with those of the other process at the end of ``channel``."""
    if kind == "shared_memory":
        message, fds, _, _ = socket.recv_fds(channel, 64, 64)
        assert message == b"links"
        return shared_links_from_fds(fds, group, SIZES)
    gpu = real_gpu(group.rank) if kind == "nccl" else None
    links = ProcessGroupLinks("nccl" if gpu else "gloo", group, SIZES, gpu=gpu)
    channel.sendall(links.exports())
    exports = [links.exports(), channel.recv(4096)]
    links.connect(exports if group.is_first_rank else exports[::-1])
    links.probe(DEADLINE_SECONDS)
    return links


def real_gpu(ordinal: int) -> GroupGpu:
    device = torch.device(f"cuda:{ordinal}")
    torch.cuda.set_device(device)
    cuda = CudaDevice(Driver(), ordinal)
    return GroupGpu(cuda, device, Kernels(cuda.driver))


def main() -> None:
    kind, rank_number, epoch, fd, what, count = sys.argv[1:]
    fds_before = set(os.listdir("/proc/self/fd"))
    channel = socket.socket(fileno=int(fd))
    group = PPGroup(int(rank_number), 2, int(epoch))
    rank = build_rank(kind, group, links_over(channel, kind, group))
    step = {"send": send, "receive": receive, "echo": echo_tokens}[what]
    channel.sendall(b"ready\n")
    for step_id in range(int(count)) if int(count) else itertools.count():
        step(rank, step_id)
    channel.sendall(b"done\n")
    channel.recv(1)  # until the parent has seen enough
    rank.close()
    if kind != "nccl":  # which keeps some of its own
        assert set(os.listdir("/proc/self/fd")) == fds_before


if __name__ == "__main__":
    signal.alarm(60)  # no orphan when the test process is killed
    main()
