"""How soon a rank knows that its peer is dead: ``python -m benchmarks.peer_loss``.

A peer process is killed while this one awaits a message of it. The closed control channel poisons the link; taken is the time
from the kill to the exception at the await. Then the same process begins the next epoch with a new peer.
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import uvloop

from benchmarks.report import environment, percentile, save, show
from orchestrator.waiting import Waker
from stages.cuda import CudaDevice
from stages.driver import Driver
from stages.errors import PeerLost
from stages.kernels import Kernels
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.copy_engine import CopyEngineTransport
from stages.transport.device_links import DeviceLinks
from stages.transport.links import LinkSizes, boundary_slot_bytes, token_slot_bytes
from stages.transport.ring import RingLayout

BOUNDARY = [TensorSchema("hidden_states", "bfloat16", 4096)]
MAX_ROWS = 64


class Rank:
    """One end of a boundary on GPU ``ordinal``, for one epoch after another."""

    def __init__(self, rank: int, ordinal: int) -> None:
        self.rank = rank
        self.torch_device = torch.device("cuda", ordinal)
        torch.cuda.set_device(ordinal)
        torch.zeros(1, device="cuda")
        self.device = CudaDevice(Driver(), ordinal)
        self.kernels = Kernels(self.device.driver)

    def link(self, epoch: int, sock: socket.socket) -> tuple[CopyEngineTransport, PPGroup, DeviceLinks]:
        group = PPGroup(self.rank, 2, epoch)
        sizes = LinkSizes(RingLayout(3, boundary_slot_bytes(BOUNDARY, MAX_ROWS)), RingLayout(3, token_slot_bytes(MAX_ROWS, 1)))
        links = DeviceLinks(self.device, self.torch_device, self.kernels, group, sizes)
        mine = links.exports()
        sock.sendall(len(mine).to_bytes(4, "little") + mine)
        theirs = sock.recv(int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little"), socket.MSG_WAITALL)
        links.connect([mine, theirs] if self.rank == 0 else [theirs, mine])
        links.probe(20)
        self.compute = self.device.stream(f"compute-{self.rank}")
        transport = CopyEngineTransport(pp_group=group, boundary=BOUNDARY, max_rows=MAX_ROWS, compute=self.compute, links=links)
        return transport, group, links


def victim(fd: int, epoch: int) -> None:
    """Rank 0: sends messages until it is killed."""
    sock = socket.socket(fileno=fd)
    rank = Rank(0, 0)
    transport, group, _ = rank.link(epoch, sock)
    for step_id in range(1 << 30):
        transport.begin_step(StepShape(step_id, MAX_ROWS, 1))
        outputs = transport.outputs(group)
        sent = transport.send(IntermediateTensors(outputs, rank.compute.record()), group)
        while not sent.is_reached():
            time.sleep(0.0002)


async def survive(rounds: int) -> tuple[list[float], int]:
    rank = Rank(1, 1 if torch.cuda.device_count() > 1 else 0)
    waker = Waker(asyncio.get_running_loop(), 200)
    times: list[float] = []
    received = 0
    rng = random.Random(3)
    for epoch in range(1, rounds + 1):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "benchmarks.peer_loss", "--victim", str(theirs.fileno()), "--epoch", str(epoch)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        transport, group, links = rank.link(epoch, ours)
        asyncio.get_running_loop().add_reader(
            ours.fileno(), lambda transport=transport, epoch=epoch: transport.poison(PeerLost(f"epoch {epoch}: rank 0 is gone"))
        )
        killed_at = 0.0

        def kill(process: subprocess.Popen[bytes] = process) -> None:
            nonlocal killed_at
            killed_at = time.perf_counter()
            os.kill(process.pid, signal.SIGKILL)

        asyncio.get_running_loop().call_later(rng.uniform(0.02, 0.1), kill)
        try:
            for step_id in range(1 << 30):
                transport.begin_step(StepShape(step_id, MAX_ROWS, 1))
                message = transport.recv(group)
                await waker.reached(message.ready, 10)
                message.release(rank.compute)
                received += 1
        except PeerLost as exc:
            times.append((time.perf_counter() - killed_at) * 1e3)
            if epoch == rounds:
                print(exc)
        asyncio.get_running_loop().remove_reader(ours.fileno())
        process.wait()
        transport.close()
        links.close()
        rank.compute.close()
        ours.close()
        (torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")).sum().item()  # the context is healthy
    waker.close()
    return times, received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--victim", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.victim is not None:
        victim(args.victim, args.epoch)
        return
    print(environment())
    times, received = uvloop.run(survive(args.rounds))
    rows = [
        {
            "kills": len(times),
            "messages before": received,
            "ms p50": percentile(times, 0.5),
            "ms p99": percentile(times, 0.99),
            "ms max": max(times),
        }
    ]
    show("From the peer's death to the exception", rows)
    save(args.json, "peer_loss", rows)


if __name__ == "__main__":
    main()
