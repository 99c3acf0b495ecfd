"""How soon a coroutine goes on once a point of a stream is reached.

``python -m benchmarks.wake``: the host stores a word in pinned memory that a stream waits for; the time until the waiter sees
the stream's next point is taken, for a tight loop over ``cuEventQuery`` and for each way to wait without blocking the loop.
"""

import argparse
import asyncio
import ctypes
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import percentile, save, show
from orchestrator.waiting import Waker
from stages.cuda import CudaDevice, CudaPoint
from stages.driver import Driver

PAUSE_SECONDS = 0.0003  # so that the stream is waiting when it is released


class Trigger:
    """A word in pinned memory that a stream waits for."""

    def __init__(self, device: CudaDevice) -> None:
        self._address = device.driver.alloc_host(64)
        self._word = ctypes.c_uint64.from_address(self._address)
        self._word.value = 0
        self._count = 0
        self.stream = device.stream("bench")
        self._device = device

    def arm(self) -> CudaPoint:
        self._count += 1
        self._device.driver.wait_value64(self.stream.handle, self._address, self._count)
        return self.stream.record()

    def pull(self) -> int:
        started = time.perf_counter_ns()
        self._word.value = self._count
        return started


def spin_on_event(device: CudaDevice, trigger: Trigger, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        point = trigger.arm()
        time.sleep(PAUSE_SECONDS)
        started = trigger.pull()
        while not device.driver.is_done(point.event):
            pass
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return samples


def spin_on_word(device: CudaDevice, trigger: Trigger, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        point = trigger.arm()
        time.sleep(PAUSE_SECONDS)
        started = trigger.pull()
        while trigger.stream.progress < point.sequence:
            pass
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return samples


async def _stamped(waker: Waker, point: CudaPoint) -> int:
    await waker.reached(point)
    return time.perf_counter_ns()


async def spinning(trigger: Trigger, count: int) -> list[float]:
    waker = Waker(asyncio.get_running_loop(), 10_000_000)
    samples = []
    for _ in range(count):
        task = asyncio.create_task(_stamped(waker, trigger.arm()))
        until = time.perf_counter() + PAUSE_SECONDS
        while time.perf_counter() < until:  # noqa: ASYNC110  the loop goes round, as it does under other work
            await asyncio.sleep(0)
        started = trigger.pull()
        samples.append((await task - started) / 1e3)
    waker.close()
    return samples


async def parked(trigger: Trigger, count: int) -> list[float]:
    waker = Waker(asyncio.get_running_loop(), 0)
    samples = []
    for _ in range(count):
        task = asyncio.create_task(_stamped(waker, trigger.arm()))
        await asyncio.sleep(0.002)  # parked by now
        started = await asyncio.to_thread(_pull_later, trigger)  # the loop sleeps meanwhile
        samples.append((await task - started) / 1e3)
    waker.close()
    return samples


def _pull_later(trigger: Trigger) -> int:
    time.sleep(0.001)
    return trigger.pull()


async def in_executor(device: CudaDevice, trigger: Trigger, count: int) -> list[float]:
    """What people do: a thread that blocks until the event is done."""
    samples = []
    loop = asyncio.get_running_loop()
    for _ in range(count):
        point = trigger.arm()

        def block(event: int = point.event) -> None:
            device.driver.make_current(device.ordinal)
            device.driver.lib.cuEventSynchronize(ctypes.c_void_p(event))

        task = asyncio.ensure_future(loop.run_in_executor(None, block))
        await asyncio.sleep(PAUSE_SECONDS * 3)
        samples.append(await _after(trigger, task))
    return samples


async def _after(trigger: Trigger, awaited: Awaitable[Any]) -> float:
    started = trigger.pull()
    await awaited
    return (time.perf_counter_ns() - started) / 1e3


async def first_after_idle(device: CudaDevice, trigger: Trigger, count: int, spin_us: int) -> list[float]:
    waker = Waker(asyncio.get_running_loop(), spin_us)
    samples = []
    for _ in range(count):
        await asyncio.sleep(1.0)
        started = time.perf_counter_ns()
        await waker.reached(trigger.stream.record())
        samples.append((time.perf_counter_ns() - started) / 1e3)
    waker.close()
    return samples


async def cpu_share(device: CudaDevice, trigger: Trigger, spin_us: int, *, is_pending: bool) -> float:
    """Share of a core that a rank's loop takes in two seconds."""
    waker = Waker(asyncio.get_running_loop(), spin_us)
    await waker.reached(trigger.stream.record())
    task = asyncio.create_task(waker.reached(trigger.arm())) if is_pending else None
    await asyncio.sleep(0.1)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.sleep(2.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    trigger.pull()
    if task is not None:
        await task
    waker.close()
    return used / (time.perf_counter() - started)


def cost_us(call: Callable[[], object], count: int = 2000) -> float:
    started = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - started) / count / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    device = CudaDevice(Driver())
    trigger = Trigger(device)
    count = args.count
    spin_on_event(device, trigger, 50)
    baseline = spin_on_event(device, trigger, count)
    ways: dict[str, list[float]] = {
        "tight loop over cuEventQuery": baseline,
        "tight loop over the pinned word": spin_on_word(device, trigger, count),
    }
    loops: dict[str, Callable[[Any], Any]] = {"uvloop": uvloop.run, "asyncio": asyncio.run}
    for name, run in loops.items():
        ways[f"{name}: Waker, spinning"] = run(spinning(trigger, count))
        ways[f"{name}: Waker, parked"] = run(parked(trigger, count // 4))
        ways[f"{name}: run_in_executor(event.synchronize)"] = run(in_executor(device, trigger, count // 4))
    ways["uvloop: first await after 1 s idle"] = uvloop.run(first_after_idle(device, trigger, 10, 200))
    p50 = percentile(baseline, 0.5)
    rows = [
        {
            "way": name,
            "p50 us": percentile(samples, 0.5),
            "p99 us": percentile(samples, 0.99),
            "p50 over event loop us": percentile(samples, 0.5) - p50,
            "p99 over its p50 us": percentile(samples, 0.99) - p50,
        }
        for name, samples in ways.items()
    ]
    show("Waking a coroutine", rows)
    save(args.json, "wake", rows)
    cpu = [
        {"state": state, "share of a core %": 100 * uvloop.run(cpu_share(device, trigger, spin_us, is_pending=is_pending))}
        for state, spin_us, is_pending in (
            ("nothing in flight", 200, False),
            ("a wait pending, parked", 200, True),
            ("a wait pending, spinning", 10_000_000, True),
        )
    ]
    show("CPU of a waiting rank", cpu)
    save(args.json, "wake_cpu", cpu)
    stream = trigger.stream
    costs = [
        {"call": "record()", "us": cost_us(stream.record)},
        {"call": "poll() of a stream with a wait", "us": _poll_cost(device, trigger)},
        {"call": "an await of a point that is reached", "us": _await_cost(stream.record())},
    ]
    show("CPU per call", costs)
    save(args.json, "wake_costs", costs)


def _poll_cost(device: CudaDevice, trigger: Trigger) -> float:
    trigger.arm().add_done_callback(lambda: None)
    cost = cost_us(device.poll)
    trigger.pull()
    return cost


def _await_cost(point: CudaPoint) -> float:
    while not point.is_reached():
        pass

    async def run() -> float:
        waker = Waker(asyncio.get_running_loop(), 0)
        started = time.perf_counter_ns()
        for _ in range(2000):
            await waker.reached(point)
        return (time.perf_counter_ns() - started) / 2000 / 1e3

    return uvloop.run(run())


if __name__ == "__main__":
    main()
