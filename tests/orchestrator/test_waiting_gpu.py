"""Points of a GPU as awaitables. A test releases a stream by writing the word that it waits for."""

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from orchestrator.waiting import CHECK_SECONDS, Waker
from stages.cuda import CudaDevice, CudaPoint, CudaStream
from stages.errors import CudaError, DeadlinePassed, PeerLost
from tests.emulated_cuda import ILLEGAL_ADDRESS, Operation, the_emulation
from tests.gpu import GPUS, gpu_device

LOOPS = ("asyncio", "uvloop")


@pytest.fixture(params=GPUS)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    with gpu_device(request.param) as made:
        yield made


@pytest.fixture
def emulated() -> Iterator[CudaDevice]:
    with gpu_device("emulated") as made:
        yield made


class Gate:
    """A word that streams wait for."""

    def __init__(self, device: CudaDevice) -> None:
        self._driver = device.driver
        self._rescue = device.rescue
        self._word = self._driver.alloc(256)
        self._driver.memset_d32_async(self._word, 0, 64, self._rescue)
        self._driver.synchronize(self._rescue)
        self._count = 0

    def stop(self, stream: CudaStream) -> int:
        """Have ``stream`` wait; what ``open`` takes."""
        self._count += 1
        self._driver.wait_value64(stream.handle, self._word, self._count)
        return self._count

    def open(self, number: int | None = None) -> None:
        self._driver.write_value64(self._rescue, self._word, self._count if number is None else number)

    def close(self) -> None:
        self._driver.synchronize(self._rescue)
        self._driver.free(self._word)


@pytest.fixture
def gate(device: CudaDevice) -> Iterator[Gate]:
    made = Gate(device)
    yield made
    made.open()
    device.driver.synchronize(device.rescue)
    for stream in list(device._streams):
        stream.close()
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


async def test_thousands_of_waits_leave_nothing_behind(device: CudaDevice, gate: Gate) -> None:
    waker = Waker(asyncio.get_running_loop(), 200)
    stream = device.stream("compute")
    for _ in range(2000):
        await waker.reached(stream.record())
    gc.collect()
    assert len(device._events) <= 8
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
    waker = Waker(asyncio.get_running_loop(), 0)
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
