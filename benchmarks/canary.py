"""Does a flag ever overtake its data? ``python -m benchmarks.canary --count 1000000``.

Messages of all sizes, with ring slots from 1 to 4 and random stalls, each filled with its own number; the receiver counts on
the device every word that is not that number. Any count but 0 is a torn read.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pair import Exchange
from benchmarks.report import environment, save, show
from benchmarks.sides import ROW_BYTES, Side, on_both_sides
from stages.transport.base import IntermediateTensors, StepShape

MAX_BYTES = 8 << 20
IN_FLIGHT = 24


def soak(sides: list[Side], exchange: Exchange, count: int) -> dict[str, Any]:
    rng = random.Random(1)
    torn = {side.rank: torch.zeros((), dtype=torch.int64, device=side.torch_device) for side in sides}
    points: list[Any] = []
    for i in range(count):
        num_rows = 1 << rng.randrange(18) if rng.random() < 0.02 else 1 << rng.randrange(11)
        stall = rng.randrange(20_000) if rng.random() < 0.01 else 0
        shape = StepShape(i, min(num_rows, MAX_BYTES // ROW_BYTES), 1)
        for side in sides:
            transport, group = side.transports[0], side.groups[0]
            transport.begin_step(shape)
            stream = torch.cuda.ExternalStream(side.compute.handle)
            with torch.cuda.stream(stream):
                if stall and (i + side.rank) % 2:
                    torch.cuda._sleep(stall)
                if side.rank == 0:
                    outputs = transport.outputs(group)
                    outputs["hidden_states"].view(torch.int32).fill_(i)
                    points.append(transport.send(IntermediateTensors(outputs, side.compute.record()), group))
                else:
                    received = transport.recv(group)
                    torn[1] += (received["hidden_states"].view(torch.int32) != i).sum()
                    received.release(side.compute)
                    points.append(received.ready)
        if len(points) > IN_FLIGHT:
            while not points[len(points) // 2].is_reached():
                time.sleep(0)
            del points[: len(points) // 2]
    torch.cuda.synchronize()
    exchange("done")
    return {"torn": int(torn[1]) if 1 in torn else 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    args = parser.parse_args()
    print(environment())
    rows = []
    for ring_slots in (1, 2, 3, 4):
        started = time.perf_counter()
        results = on_both_sides(soak, args.count // 4, num_bytes=MAX_BYTES, ring_slots=ring_slots)
        torn = sum(result["torn"] for result in results)
        seconds = time.perf_counter() - started
        rows.append({"ring slots": ring_slots, "messages": args.count // 4, "torn words": torn, "s": seconds})
    show("Ordering canary", rows)
    save(args.json, "canary", rows)
    sys.exit(1 if any(row["torn words"] for row in rows) else 0)


if __name__ == "__main__":
    main()
