"""Points of a GPU as awaitables. A test releases a stream by writing the word that it waits for."""

import asyncio
import gc
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
import uvloop

from orchestrator.waiting import CHECK_SECONDS, Waker
from stages.cuda import CudaDevice, CudaPoint
from stages.errors import CudaError, DeadlinePassed, PeerLost
from tests.emulated_cuda import ILLEGAL_ADDRESS, Operation, the_emulation
from tests.gpu import Gate

LOOPS = ("asyncio", "uvloop")


@pytest.fixture
def events(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that were ever created."""
    created: list[int] = []
    create = device.driver.create_event

    def counted() -> int:
        created.append(create())
        return created[-1]

    monkeypatch.setattr(device.driver, "create_event", counted)
    return created


@pytest.fixture
def no_safety_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.waiting.CHECK_SECONDS", 60)


@pytest.fixture
def emulated_gate(emulated: CudaDevice) -> Iterator[Gate]:
    made = Gate(emulated)
    yield made
    made.close()


async def waiting(*awaitables: asyncio.Task[None]) -> None:
    await asyncio.sleep(0)
    assert not any(task.done() for task in awaitables)


@pytest.mark.parametrize("spin_us", [0, 1_000_000])
async def test_a_coroutine_goes_on_when_the_point_is_reached(device: CudaDevice, gate: Gate, spin_us: int) -> None:
    waker = Waker(asyncio.get_running_loop(), spin_us)
    stream = device.stream("compute")
    gate.stop(stream)
    point = stream.record()
    task = asyncio.create_task(waker.reached(point))
    await waiting(task)
    gate.open()
    await asyncio.wait_for(task, 5)
    await waker.reached(point)  # and at once from then on
    assert sum(waker.wakes.values()) == 1
    waker.close()


async def test_points_of_a_stream_wake_in_its_order_and_streams_by_themselves(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 50)
    streams = [device.stream(f"s{i}") for i in range(3)]
    order: list[tuple[int, int]] = []

    async def wait(point: CudaPoint, stream: int, number: int) -> None:
        await waker.reached(point)
        order.append((stream, number))

    gates, tasks = [], []
    for number in range(4):
        for i, stream in enumerate(streams):
            gates.append(gate.stop(stream))
            tasks.append(asyncio.create_task(wait(stream.record(), i, number)))
    tasks.reverse()
    await waiting(*tasks)
    gate.open(gates[0])  # the first of the first stream; every other stream waits on
    while not order:
        await asyncio.sleep(0.001)
    assert order == [(0, 0)]
    gate.open()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    for i in range(3):
        assert [number for stream, number in order if stream == i] == [0, 1, 2, 3]
    waker.close()


async def test_thousands_of_waits_leave_nothing_behind(device: CudaDevice, gate: Gate, events: list[int]) -> None:
    waker = Waker(asyncio.get_running_loop(), 200)
    stream = device.stream("compute")
    for i in range(10_000):
        await waker.reached(stream.record(), 3600 if i % 2 else None)
    assert len(events) <= 8
    assert not stream.has_callbacks
    waker.close()


async def test_a_cancelled_await_leaves_the_stream_and_the_others_alone(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 100)
    stream = device.stream("compute")
    gate.stop(stream)
    points = [stream.record() for _ in range(50)]
    tasks = [asyncio.create_task(waker.reached(point)) for point in points for _ in range(4)]
    await waiting(*tasks)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks[::2], return_exceptions=True)
    assert not points[0].is_reached()
    gate.open()
    await asyncio.wait_for(asyncio.gather(*tasks[1::2]), 5)
    assert points[-1].is_reached()
    waker.close()


async def test_a_deadline_names_the_stream_and_leaves_it_alone(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 100)
    stream = device.stream("compute")
    gate.stop(stream)
    point = stream.record()
    with pytest.raises(DeadlinePassed, match=r"stream compute: not reached within 0\.05 s"):
        await waker.reached(point, 0.05)
    gate.open()
    await asyncio.wait_for(waker.reached(point), 5)
    waker.close()


@pytest.mark.parametrize("spin_us", [0, 1_000_000])
async def test_a_failed_stream_raises_at_the_await(device: CudaDevice, gate: Gate, spin_us: int) -> None:
    waker = Waker(asyncio.get_running_loop(), spin_us)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record()))
    await waiting(task)
    started = time.perf_counter()
    stream.fail(PeerLost("rank 1 is gone"))
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        await asyncio.wait_for(task, 5)
    assert time.perf_counter() - started < 5 * CHECK_SECONDS
    waker.close()


async def test_a_device_error_reaches_every_awaiter(emulated: CudaDevice) -> None:
    waker = Waker(asyncio.get_running_loop(), 0)
    streams = [emulated.stream("compute"), emulated.stream("send")]
    word = emulated.driver.alloc(256)
    for stream in streams:
        emulated.driver.wait_value64(stream.handle, word, 1)
    tasks = [asyncio.create_task(waker.reached(stream.record())) for stream in streams]
    await waiting(*tasks)
    the_emulation().fail(ILLEGAL_ADDRESS)
    for task in tasks:
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as info:
            await asyncio.wait_for(task, 5)
        assert info.value.code == ILLEGAL_ADDRESS
    waker.close()
    for stream in streams:
        stream.close()  # does not hang


async def test_lost_host_functions_cost_a_check_and_no_more(emulated: CudaDevice) -> None:
    waker = Waker(asyncio.get_running_loop(), 0)
    stream = emulated.stream("compute")
    the_emulation().drop_host_functions(1)
    the_emulation().delay(Operation.WRITE_VALUE, fixed_us=3000)
    for _ in range(5):
        started = time.perf_counter()
        await waker.reached(stream.record())
        assert time.perf_counter() - started < 10 * CHECK_SECONDS
    waker.close()


async def test_nothing_runs_while_nothing_is_awaited(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 500)
    stream = device.stream("compute")
    await waker.reached(stream.record())
    await asyncio.sleep(2 * CHECK_SECONDS)  # until the last check has found nothing
    started = time.process_time()
    await asyncio.sleep(0.3)  # the measurement itself
    assert time.process_time() - started < 0.03
    waker.close()


async def test_a_parked_wait_burns_little(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 2000)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record()))
    await asyncio.sleep(0.05)
    started = time.process_time()
    await asyncio.sleep(0.3)  # the measurement itself
    assert time.process_time() - started < 0.1
    gate.open()
    await asyncio.wait_for(task, 5)
    waker.close()


async def test_other_events_are_served_while_the_loop_spins(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 1_000_000)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record()))
    for _ in range(20):
        await asyncio.sleep(0.001)
    await waiting(task)
    gate.open()
    await asyncio.wait_for(task, 5)
    assert waker.wakes["spin"] == 1
    waker.close()


async def test_thousands_of_awaits_that_were_given_up_leave_nothing_behind(
    device: CudaDevice, gate: Gate, events: list[int]
) -> None:
    """Of a stream that is stuck, as when a peer is."""
    waker = Waker(asyncio.get_running_loop(), 0)
    stream = device.stream("compute")
    gate.stop(stream)
    points = [stream.record() for _ in range(3)]
    for i in range(3000):
        task = asyncio.create_task(waker.reached(points[i % 3], 0.0 if i % 2 else None))
        await asyncio.sleep(0)
        if i % 2 == 0:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not stream.has_callbacks
    assert not device.poll()
    assert not any(point.callbacks for point in points)
    gate.open()
    await asyncio.wait_for(waker.reached(points[-1]), 5)
    assert len(events) <= 8
    waker.close()


async def test_a_storm_of_cancellations_leaves_the_order(device: CudaDevice, gate: Gate) -> None:
    waker, chance = Waker(asyncio.get_running_loop(), 0), random.Random(7)
    stream, order = device.stream("compute"), list[int]()
    gate.stop(stream)

    async def wait(number: int, point: CudaPoint) -> None:
        await waker.reached(point)
        order.append(number)

    tasks = [asyncio.create_task(wait(number, stream.record())) for number in range(500)]
    await waiting(*tasks)
    kept = set(chance.sample(range(500), 100))
    for number in chance.sample(range(500), 500):
        if number not in kept:
            tasks[number].cancel()
            if chance.random() < 0.1:
                await asyncio.sleep(0)
    gate.open()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert order == sorted(kept)
    assert sum(isinstance(result, asyncio.CancelledError) for result in done) == 400
    waker.close()


async def test_an_await_may_end_with_a_timeout_of_the_stream_s_own(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 1_000_000)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record(), 30))
    await waiting(task)
    stream.fail(TimeoutError("of the forward"))
    with pytest.raises(TimeoutError, match="of the forward"):
        await asyncio.wait_for(task, 5)
    waker.close()


@pytest.mark.usefixtures("no_safety_net")
async def test_a_parked_loop_is_not_woken_before_it_can_see_why(emulated: CudaDevice, emulated_gate: Gate) -> None:
    """Where the event comes some time before the word: a wake in between would find nothing, and be the last."""
    waker = Waker(asyncio.get_running_loop(), 0)
    stream = emulated.stream("compute")
    emulated_gate.stop(stream)
    the_emulation().delay(Operation.WRITE_VALUE, fixed_us=3000)
    task = asyncio.create_task(waker.reached(stream.record()))
    await waiting(task)
    emulated_gate.open()
    await asyncio.wait_for(task, 5)
    assert waker.wakes == {"spin": 0, "park": 1, "timer": 0}
    waker.close()


@pytest.mark.usefixtures("no_safety_net")
@pytest.mark.parametrize("spin_us", [0, 2000])
async def test_a_parked_loop_that_was_woken_looks_on(device: CudaDevice, gate: Gate, spin_us: int) -> None:
    waker = Waker(asyncio.get_running_loop(), spin_us)
    stream = device.stream("compute")
    gates, tasks = [], []
    for _ in range(5):
        gates.append(gate.stop(stream))
        tasks.append(asyncio.create_task(waker.reached(stream.record())))
    for number, task in zip(gates, tasks, strict=True):
        await asyncio.sleep(0.005)  # so that it has parked
        gate.open(number)
        await asyncio.wait_for(task, 5)
    assert sum(waker.wakes.values()) == 5
    assert waker.wakes["park"] > 0
    waker.close()


@pytest.mark.usefixtures("no_safety_net")
async def test_wakes_are_counted_by_how_the_loop_came_to_look(emulated: CudaDevice, emulated_gate: Gate) -> None:
    loop, stream = asyncio.get_running_loop(), emulated.stream("compute")
    spins, parks = Waker(loop, 1_000_000), Waker(loop, 0)
    for waker in (spins, parks):
        emulated_gate.stop(stream)
        task = asyncio.create_task(waker.reached(stream.record()))
        await asyncio.sleep(0.002)  # so that whichever parks has
        emulated_gate.open()
        await asyncio.wait_for(task, 5)
        waker.close()
    assert spins.wakes == {"spin": 1, "park": 0, "timer": 0}
    assert parks.wakes == {"spin": 0, "park": 1, "timer": 0}


async def test_a_device_error_reaches_awaiters_while_the_loop_spins(emulated: CudaDevice) -> None:
    waker = Waker(asyncio.get_running_loop(), 30_000_000)
    stream, word = emulated.stream("compute"), emulated.driver.alloc(256)
    emulated.driver.wait_value64(stream.handle, word, 1)
    task = asyncio.create_task(waker.reached(stream.record()))
    await waiting(task)
    the_emulation().fail(ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        await asyncio.wait_for(task, 5)
    waker.close()
    stream.close()


async def test_nothing_runs_once_the_last_await_was_given_up(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 30_000_000)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record()))
    await waiting(task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(2 * CHECK_SECONDS)  # until the last check has found nothing
    started = time.process_time()
    await asyncio.sleep(0.3)  # the measurement itself
    assert time.process_time() - started < 0.03
    waker.close()


async def test_a_waker_closes_with_waits_pending(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 0)
    stream = device.stream("compute")
    gate.stop(stream)
    task = asyncio.create_task(waker.reached(stream.record()))
    await asyncio.sleep(0.01)  # parked by now
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    waker.close()
    gate.open()  # its host function finds a closed handle
    await asyncio.sleep(0)
    waker.close()


def test_a_host_function_may_come_after_its_loop_is_gone(emulated: CudaDevice, emulated_gate: Gate) -> None:
    loop, stream = uvloop.new_event_loop(), emulated.stream("compute")
    emulated_gate.stop(stream)

    async def park_and_leave() -> None:
        waker = Waker(asyncio.get_running_loop(), 0)
        task = asyncio.create_task(waker.reached(stream.record()))
        await asyncio.sleep(0.01)  # parked by now
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        waker.close()

    loop.run_until_complete(park_and_leave())
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None, "nothing of the Waker keeps its loop alive"
    assert the_emulation().count(Operation.HOST_FUNCTION) == 1
    emulated_gate.open()
    stream.close()  # waits for it


def test_a_loop_whose_waker_was_forgotten_still_ends() -> None:
    source = """
import asyncio, uvloop
from orchestrator.waiting import Waker
from tests.emulated_cuda import the_emulation

async def main():
    stream = device.stream("compute")
    device.driver.wait_value64(stream.handle, device.driver.alloc(256), 1)
    try:
        await Waker(asyncio.get_running_loop(), 0).reached(stream.record(), 0.01)
    except Exception as exc:
        print(exc)

device = the_emulation().device()
loop = uvloop.new_event_loop()
loop.run_until_complete(main())
try:
    loop.close()
except OSError:
    print("busy")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)
    assert done.stdout == "stream compute: not reached within 0.01 s\nbusy\n", done.stderr
