"""What token return costs: ``python -m benchmarks.tokens``.

One way: a message of 256 requests goes to and fro between two ranks, enqueued ahead and driven by the GPUs alone; half of a
round trip, in GPU time, packed by a kernel, checked and unpacked. CPU: what each call takes, its ``begin_step`` included.
Beside it, in the same run: a raw copy of as many bytes with a flag, and with two GPUs NCCL broadcasts.

Visible: from the host's store that lets the last rank's stream go on behind its sampler, until a coroutine of rank 0 goes on
with the ids in pinned memory. Beside it: the same without a message, from the store until rank 0's coroutine goes on.
"""

import argparse
import asyncio
import ctypes
import random
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.broadcasts import broadcasts_one_way
from benchmarks.pair import Exchange, run_pair
from benchmarks.report import environment, percentile, save, show
from benchmarks.sides import Side, on_both_sides, ping_pong
from benchmarks.transport import merged, raw_one_way
from orchestrator.waiting import Waker
from stages.cuda import CudaStream
from stages.driver import Driver
from stages.transport.copy_engine_tokens import CopyEngineTokenReceiver, CopyEngineTokenSender
from stages.transport.links import token_slot_bytes

NUM_REQS = 256
WIDTHS = (1, 6)
HOPS = 40
SPIN_US = 10_000
DEADLINE_SECONDS = 10
PAUSES_US = (100, 400)  # before the store: streams and loop are waiting by then

Ends = tuple[CopyEngineTokenSender, CopyEngineTokenReceiver, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def one_way(sides: list[Side], exchange: Exchange, width: int, rounds: int) -> dict[str, Any]:
    send_cpu: list[float] = []
    receive_cpu: list[float] = []
    ends = {side.rank: _ends(side, width) for side in sides}

    def send(side: Side, hop: int) -> None:
        sender, _, tensors = ends[side.rank]
        started = time.perf_counter_ns()
        sender.begin_step(side.step_id + hop)
        sender.maybe_broadcast_sampled_tokens(*tensors)
        send_cpu.append((time.perf_counter_ns() - started) / 1e3)

    def receive(side: Side, hop: int) -> None:
        receiver = ends[side.rank][1]
        started = time.perf_counter_ns()
        receiver.begin_step(side.step_id + hop)
        received = receiver.maybe_receive_sampled_tokens(NUM_REQS, width)
        receive_cpu.append((time.perf_counter_ns() - started) / 1e3)
        side.compute.wait(received.ready)

    gpu = ping_pong(sides, exchange, HOPS, rounds, send, receive)
    _close(ends)
    return {"gpu": gpu, "send cpu": send_cpu, "receive cpu": receive_cpu}


def visible(sides: list[Side], exchange: Exchange, width: int, count: int) -> dict[str, Any]:
    return uvloop.run(_visible(sides, exchange, width, count))


async def _visible(sides: list[Side], exchange: Exchange, width: int, count: int) -> dict[str, Any]:
    """When each message's gate was opened and when its ids were seen, in ns of the clock that all processes share."""
    rng = random.Random(4)
    waker = Waker(asyncio.get_running_loop(), SPIN_US)
    found: dict[str, list[int]] = {"opened": [], "seen": [], "woken": []}
    ends = {side.rank: _ends(side, width) for side in sides}
    num_ids = NUM_REQS * width
    ids_at = {side.rank: side.driver.alloc_host(8 * num_ids) for side in sides}
    gates = {side.rank: side.driver.alloc_host(64) for side in sides}
    for address in gates.values():
        ctypes.c_uint64.from_address(address).value = 0

    def open_after_pause(rank: int, number: int) -> int:
        until_ns = time.perf_counter_ns() + rng.randrange(*PAUSES_US) * 1000
        while time.perf_counter_ns() < until_ns:
            pass
        opened_ns = time.perf_counter_ns()
        ctypes.c_uint64.from_address(gates[rank]).value = number
        return opened_ns

    for step_id in range(1, count + 1):
        seen = None
        for side in sides:
            sender, receiver, tensors = ends[side.rank]
            if side.rank == 1:
                side.driver.memset_d32_async(tensors[0].data_ptr(), step_id, 2 * num_ids, side.compute.handle)
                side.driver.wait_value64(side.compute.handle, gates[1], 2 * step_id)
                sender.begin_step(step_id)
                sender.maybe_broadcast_sampled_tokens(*tensors)
            else:
                receiver.begin_step(step_id)
                received = receiver.maybe_receive_sampled_tokens(NUM_REQS, width)
                stream = receiver.stream
                assert isinstance(stream, CudaStream)
                side.driver.memcpy_async(ids_at[0], received.sampled_token_ids.data_ptr(), 8 * num_ids, stream.handle)
                seen = asyncio.create_task(_seen(waker, stream.record()))
        await asyncio.sleep(0)
        exchange("enqueued")
        if 1 in ends:
            found["opened"].append(open_after_pause(1, 2 * step_id))
        if seen is not None:
            found["seen"].append(await seen)
            words = (ctypes.c_uint32 * (2 * num_ids)).from_address(ids_at[0])
            assert all(word == step_id for word in words), f"step {step_id}: other tokens than were sent"
        exchange("finished")
        for side in sides:
            if side.rank == 0:
                side.driver.wait_value64(side.compute.handle, gates[0], 2 * step_id + 1)
                woken = asyncio.create_task(_seen(waker, side.compute.record()))
                await asyncio.sleep(0)
                opened_ns = open_after_pause(0, 2 * step_id + 1)
                found["woken"].append(await woken - opened_ns)
    waker.close()
    for side in sides:
        side.await_idle()
    exchange("done")
    _close(ends)
    for side in sides:
        side.driver.free_host(ids_at[side.rank])
        side.driver.free_host(gates[side.rank])
    return found


async def _seen(waker: Waker, point: Any) -> int:
    await waker.reached(point, DEADLINE_SECONDS)
    return time.perf_counter_ns()


def _ends(side: Side, width: int) -> Ends:
    """A rank is the last one, which sends tokens, on one of a side's two links, and receives them on the other."""
    sending = 0 if side.rank == 1 else 1
    sender = CopyEngineTokenSender(side.groups[sending], side.compute, side.links[sending])
    receiver = CopyEngineTokenReceiver(side.groups[1 - sending], side.links[1 - sending])
    ids = torch.zeros(NUM_REQS, width, dtype=torch.int64, device=side.torch_device)
    counts = torch.ones(NUM_REQS, dtype=torch.int32, device=side.torch_device)
    torch.cuda.synchronize()
    return sender, receiver, (ids, counts, counts)


def _close(ends: dict[int, Ends]) -> None:
    for sender, receiver, _ in ends.values():
        sender.close()
        receiver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples")
    args = parser.parse_args()
    rounds, count = (3, 100) if args.quick else (12, 400)
    num_gpus = Driver().device_count()
    print(environment())
    if num_gpus > 1:
        print("Each rank is a process with a GPU of its own.")
    else:
        print(
            "One GPU: both ranks are in this process, and copies stay on it. NCCL broadcasts are left out: they need two GPUs."
        )
    rows: list[dict[str, Any]] = []
    seen_rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        requests, num_bytes = f"{NUM_REQS} x {width}", token_slot_bytes(NUM_REQS, width)
        ours = on_both_sides(one_way, width, rounds, num_bytes=4096)
        raw = on_both_sides(raw_one_way, HOPS, rounds, num_bytes, num_bytes=num_bytes)
        one, floor = percentile(merged(ours, "gpu")[1:], 0.5), percentile(merged(raw, "gpu")[1:], 0.5)
        row = {
            "requests x width": requests,
            "bytes": num_bytes,
            "one way us": one,
            "raw copy + flag us": floor,
            "ratio": one / floor,
            "send CPU us p50": percentile(merged(ours, "send cpu"), 0.5),
            "receive CPU us p50": percentile(merged(ours, "receive cpu"), 0.5),
        }
        if num_gpus > 1:
            nccl = run_pair(broadcasts_one_way, NUM_REQS, width, rounds)
            for name, title in (("three", "3 NCCL broadcasts"), ("packed", "1 NCCL broadcast")):
                row[f"{title} us"] = percentile(merged(nccl, f"{name} gpu")[1:], 0.5)
                row[f"{title}, CPU us p50"] = percentile(merged(nccl, f"{name} cpu"), 0.5)
        rows.append(row)
        times = on_both_sides(visible, width, count, num_bytes=4096)
        pairs = zip(merged(times, "opened"), merged(times, "seen"), strict=True)
        seen = [(seen_ns - opened_ns) / 1e3 for opened_ns, seen_ns in pairs][count // 10 :]
        woken = [nanoseconds / 1e3 for nanoseconds in merged(times, "woken")][count // 10 :]
        seen_rows.append(
            {
                "requests x width": requests,
                "visible us p50": percentile(seen, 0.5),
                "p99": percentile(seen, 0.99),
                "without a message us p50": percentile(woken, 0.5),
                "without, p99": percentile(woken, 0.99),
            }
        )
    show("Token return", rows)
    show("Sampled tokens, until rank 0's Python sees them", seen_rows)
    save(args.json, "tokens", rows)
    save(args.json, "tokens_visible", seen_rows)


if __name__ == "__main__":
    main()
