"""What the shared-memory boundary costs on CPUs: ``python -m benchmarks.boundary``.

From the moment a forward has written its hidden states to the moment the next stage may read them, one message at a time, with
a receiver that sleeps in its wait (nothing spins). Beside it in the same rounds: gloo of ``torch.distributed``, with tensors
that are there already and with the pickled metadata that engines send before each tensor; and one thread's memcpy.
"""

import argparse
import ctypes
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import cpu_environment, percentile, save, show
from stages.device import HostStream
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.host_ring import HostRingTransport
from stages.transport.links import LinkSizes, boundary_slot_bytes, create_shared_links, shared_links_from_fds
from stages.transport.ring import RingLayout

WIDTH = 1024
BOUNDARY = [TensorSchema("hidden_states", "float32", WIDTH)]
ROW_BYTES = WIDTH * 4
SIZES = {"4 KiB": 1, "8 MiB": 2048}  # rows
MAX_ROWS = max(SIZES.values())
RING_SLOTS = 3
PAUSE_SECONDS = 300e-6  # before each message: long enough for the receiver to have gone to sleep

Times = list[int]


class End(ABC):
    """One side of a way: ``prepare`` enqueues a message of so many rows, ``go`` lets it happen, both return times in ns."""

    @abstractmethod
    def prepare(self, num_rows: int) -> None: ...

    @abstractmethod
    def go(self) -> int: ...

    def close(self) -> None:
        return


class RingEnd(End):
    """A rank with a compute stream; everything is enqueued ahead, as in a stage."""

    def __init__(self, rank: int, fds: list[int]) -> None:
        self.group = PPGroup(rank, 2, epoch=1)
        self.compute = HostStream(f"compute-{rank}")
        self.transport = HostRingTransport(
            name="shared_memory",
            pp_group=self.group,
            boundary=BOUNDARY,
            max_rows=MAX_ROWS,
            compute=self.compute,
            links=shared_links_from_fds(fds, self.group, LinkSizes(RingLayout(RING_SLOTS, slot_bytes()), RingLayout(1, 64))),
            send_stream=self.compute,
        )
        self.step_id = 0
        self.gate = threading.Lock()
        self.done = threading.Lock()
        self.gate.acquire()
        self.done.acquire()
        self.at_ns = 0

    def stamp(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def begin(self, num_rows: int) -> None:
        self.step_id += 1
        self.transport.begin_step(StepShape(self.step_id, num_rows, 1))

    def go(self) -> int:
        self.done.acquire()
        return self.at_ns

    def close(self) -> None:
        self.transport.close()
        self.compute.close()


class RingSender(RingEnd):
    def prepare(self, num_rows: int) -> None:
        self.begin(num_rows)
        outputs = self.transport.outputs(self.group)
        self.compute.launch(lambda: void(self.gate.acquire()))
        self.compute.launch(self.stamp)
        sent = self.transport.send(IntermediateTensors(outputs, self.compute.record()), self.group)
        sent.add_done_callback(self.done.release)

    def go(self) -> int:
        self.gate.release()
        return super().go()


class RingReceiver(RingEnd):
    def prepare(self, num_rows: int) -> None:
        self.begin(num_rows)
        received = self.transport.recv(self.group)
        self.compute.launch(self.stamp)
        received.release(self.compute)
        self.compute.launch(self.done.release)


class GlooEnd(End):
    """Tensors that are there already."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors = {num_rows: torch.zeros(num_rows, WIDTH) for num_rows in SIZES.values()}
        self.num_rows = 0

    def prepare(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def go(self) -> int:
        started = time.perf_counter_ns()
        if self.rank == 0:
            self.send()
            return started
        self.receive()
        return time.perf_counter_ns()

    def send(self) -> None:
        dist.send(self.tensors[self.num_rows], 1)

    def receive(self) -> None:
        dist.recv(self.tensors[self.num_rows], 0)


class GlooWithMetadata(GlooEnd):
    """Size of the metadata, metadata, tensor."""

    def send(self) -> None:
        tensor = self.tensors[self.num_rows]
        metadata = pickle.dumps([("hidden_states", "cpu", tensor.dtype, tensor.shape)])
        data = torch.frombuffer(bytearray(metadata), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), 1)
        dist.send(data, 1)
        dist.send(tensor, 1)

    def receive(self) -> None:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, 0)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, 0)
        [(_, device, dtype, shape)] = pickle.loads(data.numpy().data)
        dist.recv(torch.empty(shape, dtype=dtype, device=device), 0)


def void(_: object) -> None:
    """For a callable that must return nothing."""


def slot_bytes() -> int:
    return boundary_slot_bytes(BOUNDARY, MAX_ROWS)


def make_fds() -> list[list[int]]:
    return create_shared_links(
        2, epoch=1, boundary_slot_bytes=slot_bytes(), token_slot_bytes=64, ring_slots=RING_SLOTS, token_slots=1
    )


def receive_all(end: End, num_rows: int, count: int, tell_ready: Callable[[], None]) -> Times:
    times: Times = []
    for _ in range(count):
        end.prepare(num_rows)
        tell_ready()
        times.append(end.go())
    return times


def send_all(end: End, num_rows: int, count: int, wait_ready: Callable[[], Any]) -> Times:
    times: Times = []
    for _ in range(count):
        end.prepare(num_rows)
        wait_ready()
        time.sleep(PAUSE_SECONDS)
        times.append(end.go())
    return times


def latencies(sent: Times, received: Times) -> list[float]:
    return [(after - before) / 1e3 for before, after in zip(sent, received, strict=True)]


# ---- two processes --------------------------------------------------------------------------------------------------------


def join_gloo(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def receiver_process(connection: Connection, port: int, num_fds: int) -> None:
    """Serves rounds: a way's name, rows and count come in, the times of what was received go out."""
    torch.set_num_threads(1)
    fds = [recv_handle(connection) for _ in range(num_fds)]
    join_gloo(1, port)
    ends: dict[str, End] = {"ring": RingReceiver(1, fds), "gloo": GlooEnd(1), "metadata": GlooWithMetadata(1)}
    while (order := connection.recv()) is not None:
        way, num_rows, count = order
        connection.send(receive_all(ends[way], num_rows, count, lambda: connection.send_bytes(b"r")))
    for end in ends.values():
        end.close()
    dist.destroy_process_group()


class Processes:
    """The sending process is this one."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        ours, theirs = make_fds()
        self.connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=receiver_process, args=(other, port, len(theirs)))
        self.process.start()
        for fd in theirs:
            send_handle(self.connection, fd, self.process.pid)
            os.close(fd)
        join_gloo(0, port)
        self.ends: dict[str, End] = {"ring": RingSender(0, ours), "gloo": GlooEnd(0), "metadata": GlooWithMetadata(0)}

    def run(self, way: str, num_rows: int, count: int) -> list[float]:
        self.connection.send((way, num_rows, count))
        sent = send_all(self.ends[way], num_rows, count, lambda: self.connection.recv_bytes())
        return latencies(sent, self.connection.recv())

    def close(self) -> None:
        self.connection.send(None)
        for end in self.ends.values():
            end.close()
        dist.destroy_process_group()
        self.process.join(10)


# ---- one process ----------------------------------------------------------------------------------------------------------


class Threads:
    def __init__(self) -> None:
        ours, theirs = make_fds()
        self.sender, self.receiver = RingSender(0, ours), RingReceiver(1, theirs)

    def run(self, num_rows: int, count: int) -> list[float]:
        ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        received: Times = []
        thread = threading.Thread(
            target=lambda: received.extend(receive_all(self.receiver, num_rows, count, lambda: ready.put(None)))
        )
        thread.start()
        sent = send_all(self.sender, num_rows, count, ready.get)
        thread.join()
        return latencies(sent, received)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class Memcpy:
    """One thread's, from two sources to as many targets as the ring has slots, as the boundary copies."""

    def __init__(self) -> None:
        self.sources = [torch.ones(MAX_ROWS, WIDTH) for _ in range(2)]
        self.targets = [torch.ones(MAX_ROWS, WIDTH) for _ in range(RING_SLOTS)]

    def run(self, num_rows: int, count: int) -> list[float]:
        times: list[float] = []
        for i in range(count):
            target, source = self.targets[i % RING_SLOTS].data_ptr(), self.sources[i % 2].data_ptr()
            time.sleep(PAUSE_SECONDS)
            started = time.perf_counter_ns()
            ctypes.memmove(target, source, num_rows * ROW_BYTES)
            times.append((time.perf_counter_ns() - started) / 1e3)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=60, help="messages of a size, in each round, each way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(cpu_environment())
    processes, threads, memcpy = Processes(), Threads(), Memcpy()
    ways: dict[str, Callable[[int, int], list[float]]] = {
        "shared_memory, thread to thread": threads.run,
        "shared_memory, process to process": lambda rows, count: processes.run("ring", rows, count),
        "gloo send/recv": lambda rows, count: processes.run("gloo", rows, count),
        "gloo, pickled metadata first": lambda rows, count: processes.run("metadata", rows, count),
        "memcpy, one thread": memcpy.run,
    }
    seen: dict[tuple[str, str], list[list[float]]] = {(way, size): [] for way in ways for size in SIZES}
    for number in range(args.rounds + 1):
        for size, num_rows in SIZES.items():
            count = args.count if num_rows == 1 else max(5, args.count // 4)
            for way, run in ways.items():
                times = run(num_rows, count)
                if number > 0:  # the first warms up
                    seen[way, size].append(times)
    processes.close()
    threads.close()
    report(ways, seen, args.json)


def report(ways: Any, seen: dict[tuple[str, str], list[list[float]]], path: Path | None) -> None:
    ours = "shared_memory, thread to thread"

    def p50(way: str, size: str) -> float:
        return percentile([t for times in seen[way, size] for t in times], 0.5)

    def ratio(way: str, size: str) -> float:
        """How many times longer ``way`` takes than ours: the median over the rounds of what each round gave."""
        pairs = zip(seen[way, size], seen[ours, size], strict=True)
        return percentile([percentile(theirs, 0.5) / percentile(mine, 0.5) for theirs, mine in pairs], 0.5)

    rows = [
        {
            "way": way,
            "4 KiB p50 us": p50(way, "4 KiB"),
            "p99": percentile([t for times in seen[way, "4 KiB"] for t in times], 0.99),
            "over ours": ratio(way, "4 KiB"),
            "8 MiB p50 GB/s": MAX_ROWS * ROW_BYTES / p50(way, "8 MiB") / 1e3,
            "time over ours": ratio(way, "8 MiB"),
        }
        for way in ways
    ]
    show("A stage boundary on CPUs, one way until the receiver may read", rows)
    save(path, "boundary", rows, cpu_environment)


if __name__ == "__main__":
    main()
