"""How soon a coroutine goes on once a point of a stream is reached.

``python -m benchmarks.wake``: the host stores a word in pinned memory that a stream waits for; the time until the waiter sees
the stream's next point is taken, for a tight loop over ``cuEventQuery`` and for each way to wait without blocking the loop.

How to choose ``--spin-us``: the second table has waits of 1 to 6 ms, as between the points of a step. A wait that ends within
the spinning costs a core and wakes at once; one that outlasts it costs next to nothing and wakes later by what parking costs.
"""

import argparse
import asyncio
import ctypes
import random
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import percentile, save, show
from orchestrator.waiting import Waker
from stages.cuda import CudaDevice, CudaPoint, CudaStream
from stages.driver import Driver

PAUSE_SECONDS = 0.0003  # so that the stream is waiting when it is released
FOREVER_US = 10_000_000
DEFAULT_SPIN_US = 200
SPINS_US = (0, 50, 200, 1000, 2500, 5000, 10_000)
LOOPS: dict[str, Callable[[Any], Any]] = {"uvloop": uvloop.run, "asyncio": asyncio.run}


class Trigger:
    """A word in pinned memory that a stream waits for."""

    def __init__(self, device: CudaDevice) -> None:
        self._address = device.driver.alloc_host(64)
        self._word = ctypes.c_uint64.from_address(self._address)
        self._word.value = 0
        self._count = 0
        self.stream = device.stream("bench")
        self._device = device

    def stop(self, stream: CudaStream) -> None:
        self._count += 1
        self._device.driver.wait_value64(stream.handle, self._address, self._count)

    def arm(self) -> CudaPoint:
        self.stop(self.stream)
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


def spin_on_word(trigger: Trigger, count: int) -> list[float]:
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
    waker = Waker(asyncio.get_running_loop(), FOREVER_US)
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


async def parked(trigger: Trigger, count: int, asleep_seconds: float) -> list[float]:
    """The loop sleeps for ``asleep_seconds``, then a timer releases the stream and the loop sleeps again."""
    loop = asyncio.get_running_loop()
    waker = Waker(loop, 0)
    samples = []
    for _ in range(count):
        task = asyncio.create_task(_stamped(waker, trigger.arm()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # parked by now
        started = loop.create_future()
        loop.call_later(asleep_seconds, _pull, trigger, started)
        samples.append((await task - started.result()) / 1e3)
    waker.close()
    return samples


def _pull(trigger: Trigger, started: asyncio.Future[int]) -> None:
    started.set_result(trigger.pull())


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


async def first_after_idle(trigger: Trigger, count: int) -> list[float]:
    """From before its point is recorded, on a stream with nothing to do."""
    waker = Waker(asyncio.get_running_loop(), DEFAULT_SPIN_US)
    samples = []
    for _ in range(count):
        await asyncio.sleep(1.0)
        started = time.perf_counter_ns()
        await waker.reached(trigger.stream.record())
        samples.append((time.perf_counter_ns() - started) / 1e3)
    waker.close()
    return samples


def _wait_seconds(count: int) -> list[float]:
    chance = random.Random(11)
    return [chance.randint(1, 6) / 1e3 for _ in range(count)]


def long_waits_on_event(device: CudaDevice, trigger: Trigger, count: int) -> dict[str, Any]:
    """The floor of the next: after a longer wait the GPU itself takes longer to see the store."""
    samples: list[float] = []
    for seconds in _wait_seconds(count):
        point = trigger.arm()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        started = trigger.pull()
        while not device.driver.is_done(point.event):
            pass
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return _spin_row("tight loop over cuEventQuery", samples, 100.0, 100.0)


async def long_waits(trigger: Trigger, count: int, spin_us: int) -> dict[str, Any]:
    """Waits of 1 to 6 ms, one after the other: how late each wake is, and the share of a core that all of it takes."""
    loop = asyncio.get_running_loop()
    waker = Waker(loop, spin_us)
    samples: list[float] = []
    before, started_at = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for seconds in _wait_seconds(count):
        started = loop.create_future()
        loop.call_later(seconds, _pull, trigger, started)
        woken = await _stamped(waker, trigger.arm())
        samples.append((woken - started.result()) / 1e3)
    share = _cpu_seconds_since(before) / (time.perf_counter() - started_at)
    waker.close()
    return _spin_row(str(spin_us), samples, 100 * share, 100 * waker.wakes["spin"] / count)


def _spin_row(spin_us: str, samples: list[float], cpu_percent: float, spun_percent: float) -> dict[str, Any]:
    return {
        "--spin-us": spin_us,
        "p50 us": percentile(samples, 0.5),
        "p99 us": percentile(samples, 0.99),
        "share of a core %": cpu_percent,
        "found spinning %": spun_percent,
    }


async def cpu_share(trigger: Trigger, seconds: float, spin_us: int, *, is_pending: bool) -> float:
    """Share of a core that a rank's loop takes."""
    waker = Waker(asyncio.get_running_loop(), spin_us)
    await waker.reached(trigger.stream.record())
    task = asyncio.create_task(waker.reached(trigger.arm())) if is_pending else None
    await asyncio.sleep(0.1)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.sleep(seconds)
    share = _cpu_seconds_since(before) / (time.perf_counter() - started)
    trigger.pull()
    if task is not None:
        await task
    waker.close()
    return share


def _cpu_seconds_since(before: resource.struct_rusage) -> float:
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cost_us(call: Callable[[], object], count: int = 1000) -> float:
    started = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - started) / count / 1e3


def costs(device: CudaDevice, trigger: Trigger) -> list[dict[str, Any]]:
    """CPU time of the calls that each point costs, in microseconds."""
    stream, driver = trigger.stream, device.driver
    rows = {"record()": cost_us(stream.record), "record(is_told=False)": cost_us(lambda: stream.record(is_told=False))}
    points = [stream.record() for _ in range(500)]
    driver.synchronize(stream.handle)
    found, placed = iter(points), iter(points)
    rows["is_reached() that finds it so"] = cost_us(lambda: next(found).is_reached(), len(points))
    rows["reached_at_ns, once it is"] = cost_us(lambda: next(placed).reached_at_ns, len(points))
    rows["of which cuEventElapsedTime"] = cost_us(lambda: driver.elapsed_ms(points[0].event, points[9].event))
    rows["await of a point that is reached"] = _await_cost(points[-1])
    others = [device.stream(f"other-{i}") for i in range(8)]
    for other in others:
        trigger.stop(other)
        other.record().add_done_callback(_ignore)
        if other is others[0]:
            rows["poll(), 1 stream awaited"] = cost_us(device.poll)
    rows["poll(), 8 streams awaited"] = cost_us(device.poll)
    labs = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value or 0
    rows["arm(), a stream"] = cost_us(lambda: device.arm(labs, 0), 1) / len(others)
    trigger.pull()
    for other in others:
        other.close()
    return [{"call": call, "us": us} for call, us in rows.items()]


def _ignore() -> None:
    pass


def _await_cost(point: CudaPoint) -> float:
    async def run() -> float:
        waker = Waker(asyncio.get_running_loop(), 0)
        started = time.perf_counter_ns()
        for _ in range(2000):
            await waker.reached(point)
        return (time.perf_counter_ns() - started) / 2000 / 1e3

    return uvloop.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    args = parser.parse_args()
    device = CudaDevice(Driver())
    trigger = Trigger(device)
    count, seconds = (args.count // 10, 0.5) if args.quick else (args.count, 2.0)
    spin_on_event(device, trigger, 50)
    baseline = spin_on_event(device, trigger, count)
    ways: dict[str, list[float]] = {
        "tight loop over cuEventQuery": baseline,
        "tight loop over the pinned word": spin_on_word(trigger, count),
    }
    for name, run in LOOPS.items():
        ways[f"{name}: Waker, spinning"] = run(spinning(trigger, count))
        ways[f"{name}: Waker, just parked"] = run(parked(trigger, count // 4, 0.0005))
        ways[f"{name}: Waker, parked for 5 ms"] = run(parked(trigger, count // 4, 0.005))
        ways[f"{name}: run_in_executor(event.synchronize)"] = run(in_executor(device, trigger, count // 4))
    ways["uvloop: first await after 1 s idle"] = uvloop.run(first_after_idle(trigger, 3 if args.quick else 10))
    p50 = percentile(baseline, 0.5)
    rows = [
        {
            "way": name,
            "p50 us": percentile(samples, 0.5),
            "p99 us": percentile(samples, 0.99),
            "p50 over cuEventQuery's p50": percentile(samples, 0.5) - p50,
            "p99 over cuEventQuery's p50": percentile(samples, 0.99) - p50,
        }
        for name, samples in ways.items()
    ]
    show("Waking a coroutine", rows)
    save(args.json, "wake", rows)
    spins = [
        long_waits_on_event(device, trigger, count // 4),
        *(uvloop.run(long_waits(trigger, count // 4, spin_us)) for spin_us in SPINS_US),
    ]
    show("Waits of 1 to 6 ms on uvloop", spins)
    save(args.json, "wake_spin_us", spins)
    cpu = [
        {
            "state": state,
            "share of a core %": 100 * uvloop.run(cpu_share(trigger, seconds, spin_us, is_pending=is_pending)),
        }
        for state, spin_us, is_pending in (
            ("nothing in flight", DEFAULT_SPIN_US, False),
            ("a wait pending, parked", DEFAULT_SPIN_US, True),
            ("a wait pending, spinning", FOREVER_US, True),
        )
    ]
    show("CPU of a waiting rank", cpu)
    save(args.json, "wake_cpu", cpu)
    calls = costs(device, trigger)
    show("CPU per call", calls)
    save(args.json, "wake_costs", calls)


if __name__ == "__main__":
    main()
