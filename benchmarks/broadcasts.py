"""Token return as others do it: NCCL broadcasts of ids, num_sampled and num_rejected, or one of all three packed."""

import ctypes
import time
from typing import Any

import torch
from torch import distributed

from benchmarks.pair import Exchange
from stages.driver import Driver
from stages.transport.links import token_slot_bytes

TCPStore = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]

HOPS = 10  # a launch that finds the queue full blocks, and nothing goes before all are enqueued


def broadcasts_one_way(rank: int, exchange: Exchange, num_reqs: int, width: int, rounds: int) -> dict[str, Any]:
    """As ``one_way`` in ``benchmarks.tokens``, in a process and on a GPU of each rank's own."""
    torch_device = torch.device("cuda", rank)
    torch.cuda.set_device(torch_device)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = exchange(None if store is None else store.port)[0]
    if store is None:
        store = TCPStore("127.0.0.1", port, 2, is_master=False)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch_device)
    counts = torch.ones(num_reqs, dtype=torch.int32, device=torch_device)
    ids = torch.zeros(num_reqs, width, dtype=torch.int64, device=torch_device)
    packed = torch.zeros(token_slot_bytes(num_reqs, width), dtype=torch.uint8, device=torch_device)
    driver = Driver()
    gate = driver.alloc_host(64)
    found: dict[str, Any] = {}
    for name, tensors in (("three", [ids, counts, counts.clone()]), ("packed", [packed])):
        gpu: list[float] = []
        cpu: list[float] = []
        for tensor in tensors:  # makes the communicator
            distributed.broadcast(tensor, src=0)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(rounds):
                ctypes.c_uint64.from_address(gate).value = 0
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if rank == 0:
                    driver.wait_value64(stream.cuda_stream, gate, 1)
                start.record()
                for root in (0, 1) * HOPS:
                    started = time.perf_counter_ns()
                    for tensor in tensors:
                        distributed.broadcast(tensor, src=root)
                    cpu.append((time.perf_counter_ns() - started) / 1e3)
                end.record()
                exchange("enqueued")
                ctypes.c_uint64.from_address(gate).value = 1
                stream.synchronize()
                if rank == 0:
                    gpu.append(start.elapsed_time(end) * 1e3 / (2 * HOPS))
                exchange("finished")
        found |= {f"{name} gpu": gpu, f"{name} cpu": cpu}
    distributed.destroy_process_group()
    return found
