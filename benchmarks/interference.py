"""What a transfer costs the kernels beside it: ``python -m benchmarks.interference``.

An 8192 x 8192 x 8192 bf16 product alone, with a receive pending on another stream, and while messages arrive.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.report import environment, percentile, save, show
from benchmarks.sides import Side

SIZE = 8192
COUNT = 60
MESSAGE_BYTES = 64 << 20


def products(count: int, a: torch.Tensor, b: torch.Tensor, between: Callable[[], None] = lambda: None) -> list[float]:
    """Milliseconds of each product."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        torch.matmul(a, b)
        event.record()
        between()
    torch.cuda.current_stream().synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(environment())
    sides = [Side(rank, 0, MESSAGE_BYTES) for rank in range(2)]
    exports = [side.exports() for side in sides]
    for side in sides:
        side.connect(exports)
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work = torch.cuda.Stream()
    with torch.cuda.stream(work):
        products(20, a, b)
        alone = products(COUNT, a, b)
        sides[0].close_gate()
        sides[1].receive(0).release(sides[1].compute)  # its stream waits for a message
        pending = products(COUNT, a, b)
        again = products(COUNT, a, b)
        sides[0].send(0)
        sides[0].open_gate()
        for side in sides:
            side.await_idle()
        step = iter(range(1, 10_000))

        def transfer() -> None:
            step_id = next(step)
            sides[0].send(step_id)
            sides[1].receive(step_id).release(sides[1].compute)

        during = products(COUNT, a, b, transfer)
        after = products(COUNT, a, b)
    base = percentile(alone + after, 0.5)
    rows = [
        {"product": name, "ms p50": percentile(times, 0.5), "of alone": percentile(times, 0.5) / base}
        for name, times in (
            ("alone", alone),
            ("a receive pending", pending),
            ("a receive pending, again", again),
            ("during 64 MiB messages", during),
            ("alone, after", after),
        )
    ]
    show("A matrix product beside transfers", rows)
    save(args.json, "interference", rows)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
