"""The two ends of a stage boundary for the benchmarks: real links and transports, driven by the GPUs alone.

Each side has a link to the other in both directions. With two GPUs a side is a process; with one both are in this process, and
the copies stay on the GPU: what is compared then is what a message costs besides its copy.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.pair import Exchange, run_pair
from stages.cuda import CudaDevice, CudaStream
from stages.device import Point
from stages.driver import Driver
from stages.kernels import Kernels
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.copy_engine import CopyEngineTransport
from stages.transport.device_links import DeviceLinks
from stages.transport.links import LinkSizes, boundary_slot_bytes, token_slot_bytes
from stages.transport.ring import RingLayout

EPOCH = 1
ROW_BYTES = 64  # a boundary of 32 bf16 values, so that any size is some number of rows


class Side:
    """One side: ``there`` carries messages to the other, ``back`` from it; on the other side it is the other way round."""

    def __init__(self, rank: int, ordinal: int, num_bytes: int, ring_slots: int = 3, token_slots: int = 3) -> None:
        self.rank = rank
        self.num_rows = max(num_bytes // ROW_BYTES, 1)
        self.boundary = [TensorSchema("hidden_states", "bfloat16", ROW_BYTES // 2)]
        self.driver = Driver()
        torch.cuda.set_device(ordinal)
        torch.zeros(1, device="cuda")
        self.device = CudaDevice(self.driver, ordinal)
        self.torch_device = torch.device("cuda", ordinal)
        kernels = Kernels(self.driver)
        sizes = LinkSizes(
            RingLayout(ring_slots, boundary_slot_bytes(self.boundary, self.num_rows)),
            RingLayout(token_slots, token_slot_bytes(256, 6)),
        )
        groups = [PPGroup(rank, 2, EPOCH), PPGroup(1 - rank, 2, EPOCH)]
        self.groups = groups
        self.links = [DeviceLinks(self.device, self.torch_device, kernels, group, sizes) for group in groups]
        self.compute: CudaStream = self.device.stream(f"compute-{rank}")
        self.transports: list[CopyEngineTransport] = []
        self.step_id = 0  # of the next message
        self.raw_seq = 1 << 20  # of the next message without a transport: beyond what those with one count to
        self._gate_at = self.driver.alloc_host(64)
        self._gate = ctypes.c_uint64.from_address(self._gate_at)
        self._gate.value = 0

    def exports(self) -> list[bytes]:
        return [links.exports() for links in self.links]

    def connect(self, exports: list[list[bytes]]) -> None:
        """From what both sides' ``exports`` gave, in rank order."""
        other = 1 - self.rank
        for which, links in enumerate(self.links):
            mine, theirs = exports[self.rank][which], exports[other][which]
            links.connect([mine, theirs] if self.groups[which].rank == 0 else [theirs, mine])
        for which, links in enumerate(self.links):
            self.transports.append(
                CopyEngineTransport(
                    pp_group=self.groups[which],
                    boundary=self.boundary,
                    max_rows=self.num_rows,
                    compute=self.compute,
                    links=links,
                    sends_on_compute=True,
                )
            )

    @property
    def sending(self) -> int:
        """Which of the two links this side sends on."""
        return 0 if self.rank == 0 else 1

    def begin(self, which: int, step_id: int) -> None:
        self.transports[which].begin_step(StepShape(step_id, self.num_rows, 1))

    def send(self, step_id: int) -> Point:
        which = self.sending
        transport, group = self.transports[which], self.groups[which]
        self.begin(which, step_id)
        tensors = transport.outputs(group)
        ready = self.compute.record(is_told=not transport.sends_inline(self.num_rows))  # as a stage does after its forward
        return transport.send(IntermediateTensors(tensors, ready), group)

    def receive(self, step_id: int) -> Any:
        which = 1 - self.sending
        self.begin(which, step_id)
        return self.transports[which].recv(self.groups[which])

    def close_gate(self) -> None:
        """Have ``compute`` wait until ``open_gate``: what is enqueued meanwhile then goes at once."""
        self.driver.wait_value64(self.compute.handle, self._gate_at, self._gate.value + 1)

    def open_gate(self) -> None:
        self._gate.value += 1

    def await_idle(self, timeout_seconds: float = 60) -> None:
        """Until ``compute`` has run what is enqueued."""
        deadline = time.monotonic() + timeout_seconds
        while not self.driver.is_idle(self.compute.handle):
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} did not finish within {timeout_seconds:g} s")

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for links in self.links:
            links.close()
        self.compute.close()
        self.driver.free_host(self._gate_at)


def ping_pong(
    sides: list[Side],
    exchange: Exchange,
    hops: int,
    rounds: int,
    send: Callable[[Side, int], object],
    receive: Callable[[Side, int], object],
) -> list[float]:
    """A message goes to and fro ``hops`` times a round, all of it enqueued before the first may go.

    ``send(side, hop)`` and ``receive(side, hop)`` enqueue on the side's compute stream, or order it after what they enqueue.
    Returns microseconds of GPU time one way, for each round; nothing where rank 0 is elsewhere.
    """
    times: list[float] = []
    for _ in range(rounds):
        start = None
        for hop in range(hops):
            for side in sides:
                if side.rank == 0:
                    if hop == 0:
                        side.close_gate()
                        start = side.compute.record()
                    send(side, hop)
                    receive(side, hop)
                else:
                    receive(side, hop)
                    send(side, hop)
        exchange("enqueued")
        for side in sides:
            if start is not None and side.rank == 0:
                end = side.compute.record()
                side.open_gate()
                side.await_idle()
                times.append(side.driver.elapsed_ms(start.event, end.event) * 1e3 / (2 * hops))
        for side in sides:
            side.await_idle()
            side.step_id += hops
            side.raw_seq += hops
        exchange("finished")
    return times


def on_both_sides(
    work: Callable[..., Any], *arguments: Any, num_bytes: int, ring_slots: int = 3, num_gpus: int | None = None
) -> list[Any]:
    """``work(sides, exchange, *arguments)``: a side a process where there are two GPUs, else both sides in this one."""
    count = Driver().device_count() if num_gpus is None else num_gpus
    if count > 1:
        return run_pair(_one_side, work, num_bytes, ring_slots, *arguments)
    sides = [Side(rank, 0, num_bytes, ring_slots) for rank in range(2)]
    exports = [side.exports() for side in sides]
    for side in sides:
        side.connect(exports)
    try:
        return [work(sides, lambda data: [data], *arguments)]
    finally:
        for side in sides:
            side.close()


def _one_side(rank: int, exchange: Exchange, work: Callable[..., Any], num_bytes: int, ring_slots: int, *arguments: Any) -> Any:
    side = Side(rank, rank, num_bytes, ring_slots)
    side.connect(exchange(side.exports()))
    exchange("connected")
    try:
        return work([side], exchange, *arguments)
    finally:
        exchange("done")
        side.close()
