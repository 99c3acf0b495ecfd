"""What a stage boundary costs: ``python -m benchmarks.transport``.

One way: a message goes to and fro, enqueued ahead and driven by the GPUs alone; half of a round trip, in GPU time, with headers
written, checked and reported. Streaming: messages one after the other. CPU: what ``send`` and ``recv`` take of the caller.

Beside it, in the same run: the raw peer copy with a flag, and the flag alone.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.pair import Exchange
from benchmarks.report import environment, percentile, save, show
from benchmarks.sides import EPOCH, ROW_BYTES, Side, on_both_sides, ping_pong
from stages.transport.ring import SLOT_HEADER_BYTES, counter_word

SIZES = [64, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
HOPS = 40
ROUNDS = 8
STREAMED = 48


def one_way(sides: list[Side], exchange: Exchange, hops: int, rounds: int) -> dict[str, Any]:
    """Ours, and the CPU time of each ``send`` and ``recv``, with ``begin_step`` and the credit."""
    send_cpu: list[float] = []
    recv_cpu: list[float] = []

    def send(side: Side, hop: int) -> None:
        started = time.perf_counter_ns()
        side.send(side.step_id + hop)
        send_cpu.append((time.perf_counter_ns() - started) / 1e3)

    def receive(side: Side, hop: int) -> None:
        started = time.perf_counter_ns()
        side.receive(side.step_id + hop).release(side.compute)
        recv_cpu.append((time.perf_counter_ns() - started) / 1e3)

    gpu = ping_pong(sides, exchange, hops, rounds, send, receive)
    return {"gpu": gpu, "cpu": [sum(both) for both in zip(send_cpu, recv_cpu, strict=True)]}


def raw_one_way(sides: list[Side], exchange: Exchange, hops: int, rounds: int, num_bytes: int) -> dict[str, Any]:
    """The floor: on one stream a side, wait for a flag, copy, write the other's flag. ``num_bytes`` 0: the flag alone."""
    buffers = {side.rank: side.driver.alloc(max(num_bytes, 256)) for side in sides}

    def send(side: Side, hop: int) -> None:
        sender = side.links[side.sending].to_next
        assert sender is not None
        if num_bytes:
            side.driver.memcpy_async(sender.slot(0), buffers[side.rank], num_bytes, side.compute.handle)
        side.driver.write_value64(side.compute.handle, sender.peer_memory, counter_word(EPOCH, side.raw_seq + hop + 1))

    def receive(side: Side, hop: int) -> None:
        receiver = side.links[1 - side.sending].from_prev
        assert receiver is not None
        side.driver.wait_value64(side.compute.handle, receiver.memory, counter_word(EPOCH, side.raw_seq + hop + 1))

    gpu = ping_pong(sides, exchange, hops, rounds, send, receive)
    for side in sides:
        side.driver.free(buffers[side.rank])
    return {"gpu": gpu}


def streaming(sides: list[Side], exchange: Exchange, count: int, rounds: int) -> dict[str, Any]:
    """Messages from rank 0 to rank 1, GB/s seen by the receiver."""
    rates: list[float] = []
    for _ in range(rounds):
        points: list[Any] = []
        for side in sides:
            if side.rank == 0:
                side.close_gate()
        for i in range(count):
            for side in sides:
                if side.rank == 0:
                    side.send(side.step_id + i)
                else:
                    received = side.receive(side.step_id + i)
                    points.append(received.ready)
                    received.release(side.compute)
        exchange("enqueued")
        for side in sides:
            side.step_id += count
            if side.rank == 0:
                side.open_gate()
        for side in sides:
            side.await_idle()
            if side.rank == 1:
                rates.append(side.num_rows * ROW_BYTES * (count - 1) / points[-1].seconds_since(points[0]) / 1e9)
        exchange("finished")
    return {"rate": rates}


def raw_streaming(sides: list[Side], exchange: Exchange, count: int, rounds: int) -> dict[str, Any]:
    """Copies on one stream with nothing between them."""
    rates: list[float] = []
    for side in sides:
        sender = side.links[side.sending].to_next
        if side.rank == 0 and sender is not None:
            num_bytes = side.num_rows * ROW_BYTES
            source = side.driver.alloc(num_bytes + SLOT_HEADER_BYTES)
            for _ in range(rounds):
                side.close_gate()
                start = side.compute.record()
                for i in range(count):
                    side.driver.memcpy_async(sender.slot(i), source, num_bytes, side.compute.handle)
                end = side.compute.record()
                side.open_gate()
                side.await_idle()
                rates.append(num_bytes * count / side.driver.elapsed_ms(start.event, end.event) / 1e6)
            side.driver.free(source)
    exchange("finished")
    return {"rate": rates}


def merged(results: list[dict[str, Any]], key: str) -> list[float]:
    return [value for result in results for value in result.get(key, [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    args = parser.parse_args()
    print(environment())
    rows = []
    for size in args.sizes:
        hops = HOPS if size <= 16 << 20 else 10
        ours = on_both_sides(one_way, hops, ROUNDS, num_bytes=size)
        raw = on_both_sides(raw_one_way, hops, ROUNDS, size, num_bytes=size)
        flag = on_both_sides(raw_one_way, hops, ROUNDS, 0, num_bytes=size)
        streamed = on_both_sides(streaming, STREAMED if size <= 16 << 20 else 12, ROUNDS, num_bytes=size)
        bare = on_both_sides(raw_streaming, STREAMED if size <= 16 << 20 else 12, ROUNDS, num_bytes=size)
        one, floor = percentile(merged(ours, "gpu")[1:], 0.5), percentile(merged(raw, "gpu")[1:], 0.5)
        rate, bare_rate = percentile(merged(streamed, "rate")[1:], 0.5), percentile(merged(bare, "rate")[1:], 0.5)
        rows.append(
            {
                "bytes": size,
                "one way us": one,
                "raw copy + flag us": floor,
                "ratio": one / floor,
                "flag us": percentile(merged(flag, "gpu")[1:], 0.5),
                "streaming GB/s": rate,
                "raw copies GB/s": bare_rate,
                "share": rate / bare_rate,
                "CPU send+recv us p50": percentile(merged(ours, "cpu"), 0.5),
                "p99": percentile(merged(ours, "cpu"), 0.99),
            }
        )
    show("A stage boundary", rows)
    save(args.json, "transport", rows)


if __name__ == "__main__":
    main()
