"""What token return costs: ``python -m benchmarks.tokens``.

A message of 256 requests goes to and fro between two ranks, enqueued ahead and driven by the GPUs alone: half of a round trip,
in GPU time, packed by a kernel, checked and unpacked. Beside it, in the same run: a raw copy of as many bytes with a flag.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pair import Exchange
from benchmarks.report import environment, percentile, save, show
from benchmarks.sides import Side, await_idle, on_both_sides
from benchmarks.transport import close_gate, merged, open_gate, raw_one_way
from stages.transport.copy_engine_tokens import CopyEngineTokenReceiver, CopyEngineTokenSender
from stages.transport.links import token_slot_bytes

NUM_REQS = 256
HOPS = 40
ROUNDS = 8


def one_way(sides: list[Side], exchange: Exchange, width: int) -> dict[str, Any]:
    cpu: list[float] = []
    gpu: list[float] = []
    ends = {side.rank: _ends(side, width) for side in sides}
    for round_number in range(ROUNDS):
        start = gate = None
        for hop in range(HOPS):
            step_id = round_number * HOPS + hop
            for side in sides:
                sender, receiver, tensors = ends[side.rank]
                sender.begin_step(step_id)
                receiver.begin_step(step_id)
                started = time.perf_counter_ns()
                if side.rank == 0:
                    if hop == 0:
                        gate = close_gate(side)
                        start = side.compute.record()
                    sender.maybe_broadcast_sampled_tokens(*tensors)
                    received = receiver.maybe_receive_sampled_tokens(NUM_REQS, width)
                    side.compute.wait(received.ready)
                else:
                    received = receiver.maybe_receive_sampled_tokens(NUM_REQS, width)
                    side.compute.wait(received.ready)
                    sender.maybe_broadcast_sampled_tokens(*tensors)
                cpu.append((time.perf_counter_ns() - started) / 1e3)
        exchange("enqueued")
        for side in sides:
            if start is not None and gate is not None and side.rank == 0:
                end = side.compute.record()
                open_gate(gate)
                await_idle(side.device, side.compute)
                gpu.append(side.driver.elapsed_ms(start.event, end.event) * 1e3 / (2 * HOPS))
        for side in sides:
            await_idle(side.device, side.compute)
        exchange("finished")
    for sender, receiver, _ in ends.values():
        sender.close()
        receiver.close()
    return {"gpu": gpu, "cpu": cpu}


def _ends(side: Side, width: int) -> tuple[CopyEngineTokenSender, CopyEngineTokenReceiver, tuple[torch.Tensor, ...]]:
    """A rank is the last one, which sends tokens, on one of a side's two links, and receives them on the other."""
    sending = 0 if side.rank == 1 else 1
    sender = CopyEngineTokenSender(side.groups[sending], side.compute, side.links[sending])
    receiver = CopyEngineTokenReceiver(side.groups[1 - sending], side.links[1 - sending])
    ids = torch.zeros(NUM_REQS, width, dtype=torch.int64, device=side.torch_device)
    counts = torch.ones(NUM_REQS, dtype=torch.int32, device=side.torch_device)
    torch.cuda.synchronize()
    return sender, receiver, (ids, counts, counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(environment())
    rows = []
    for width in (1, 6):
        num_bytes = token_slot_bytes(NUM_REQS, width)
        ours = on_both_sides(one_way, width, num_bytes=4096, ring_slots=3)
        raw = on_both_sides(raw_one_way, HOPS, ROUNDS, num_bytes, num_bytes=num_bytes)
        one, floor = percentile(merged(ours, "gpu")[1:], 0.5), percentile(merged(raw, "gpu")[1:], 0.5)
        rows.append(
            {
                "requests x width": f"{NUM_REQS} x {width}",
                "bytes": num_bytes,
                "one way us": one,
                "raw copy + flag us": floor,
                "ratio": one / floor,
                "CPU send+recv us p50": percentile(merged(ours, "cpu"), 0.5),
            }
        )
    show("Token return", rows)
    save(args.json, "tokens", rows)


if __name__ == "__main__":
    main()
