"""Points as awaitables."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from orchestrator.waiting import Waker
from stages.device import HostStream, Point

LOOPS = ("asyncio", "uvloop")


@pytest.fixture
def stream() -> Iterator[HostStream]:
    made = HostStream("test")
    yield made
    made.close()


def stop(stream: HostStream) -> threading.Event:
    gate = threading.Event()

    def wait() -> None:
        gate.wait(20)

    stream.launch(wait)
    return gate


async def test_a_coroutine_goes_on_when_the_point_is_reached(stream: HostStream) -> None:
    waker = Waker(asyncio.get_running_loop())
    gate = stop(stream)
    point = stream.record()
    task = asyncio.create_task(waker.reached(point))
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    await task
    await waker.reached(point)  # and at once from then on


async def test_thousands_of_waits_are_all_woken(stream: HostStream) -> None:
    waker = Waker(asyncio.get_running_loop())
    gate = stop(stream)
    points: list[Point] = [stream.record() for _ in range(5000)]
    order: list[int] = []

    async def wait(i: int) -> None:
        await waker.reached(points[i])
        order.append(i)

    tasks = [asyncio.create_task(wait(i)) for i in range(len(points))]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert order == list(range(5000)), "Points of one stream wake their awaiters in its order"


async def test_an_error_is_raised_at_the_await(stream: HostStream) -> None:
    waker = Waker(asyncio.get_running_loop())
    gate = stop(stream)

    def fail() -> None:
        raise OSError("the device is gone")

    stream.launch(fail)
    task = asyncio.create_task(waker.reached(stream.record()))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(OSError, match="the device is gone"):
        await task


async def test_cancelling_an_await_leaves_the_stream_and_the_others_alone(stream: HostStream) -> None:
    waker = Waker(asyncio.get_running_loop())
    gate = stop(stream)
    point = stream.record()
    cancelled, other = (asyncio.create_task(waker.reached(point)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not point.is_reached()
    gate.set()
    await other
    assert point.is_reached()
