"""Streams and Points of a GPU."""

import time
from collections.abc import Iterator

import pytest

from stages.cuda import CudaDevice, CudaPoint
from stages.device import HostStream
from tests.emulated_cuda import Operation, the_emulation
from tests.gpu import GPUS, gpu_device


@pytest.fixture(params=GPUS)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    with gpu_device(request.param) as made:
        yield made


@pytest.fixture
def emulated() -> Iterator[CudaDevice]:
    with gpu_device("emulated") as made:
        yield made


def reach(point: CudaPoint) -> None:
    deadline = time.monotonic() + 10
    while not point.is_reached():
        assert time.monotonic() < deadline


def test_a_point_follows_what_was_enqueued_before_it(device: CudaDevice) -> None:
    driver = device.driver
    stream, other = device.stream("a"), device.stream("b")
    word = driver.alloc(256)
    driver.memset_d32_async(word, 0, 64, device.rescue)
    driver.synchronize(device.rescue)
    driver.wait_value64(stream.handle, word, 7)
    first = stream.record()
    other.wait(first)
    behind = other.record()
    called: list[str] = []
    behind.add_done_callback(lambda: called.append("behind"))
    assert device.poll()
    assert not first.is_reached()
    assert not behind.is_reached()
    assert first.reached_at_ns == 0
    driver.write_value64(device.rescue, word, 7)
    reach(behind)
    assert first.is_reached()
    assert not device.poll()
    assert called == ["behind"]
    behind.add_done_callback(lambda: called.append("late"))
    assert called == ["behind", "late"]
    for made in (stream, other):
        made.close()
    driver.free(word)


def test_a_store_and_its_point_come_in_order(device: CudaDevice) -> None:
    stream = device.stream("a")
    word = device.driver.alloc_host(64)
    points = [stream.record_with(word, value) for value in range(1, 200)]
    reach(points[-1])
    assert all(point.is_reached() for point in points)
    stream.close()
    device.driver.free_host(word)


def test_events_are_used_again(device: CudaDevice) -> None:
    stream = device.stream("a")
    for _ in range(300):
        reach(stream.record())
    assert len(device._events) <= 4
    stream.close()


def test_a_failed_callable_fails_what_follows_and_what_waits_for_it(device: CudaDevice) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the forward")

    stream, other = device.stream("a"), device.stream("b")
    before = stream.record()
    reach(before)
    stream.launch(fail)
    after = stream.record()
    with pytest.raises(ZeroDivisionError):
        reach(after)
    other.wait(after)
    with pytest.raises(ZeroDivisionError):
        reach(other.record())
    assert before.is_reached()
    stream.launch(lambda: pytest.fail("what follows a failure is skipped"))
    stream.close()
    other.close()


def test_a_stream_of_a_gpu_waits_for_no_other_kind(device: CudaDevice) -> None:
    stream, host = device.stream("a"), HostStream("host")
    with pytest.raises(TypeError, match="stream a of a GPU cannot wait for a HostPoint"):
        stream.wait(host.record())
    stream.close()
    host.close()


def test_a_closed_stream_takes_nothing(device: CudaDevice) -> None:
    stream = device.stream("a")
    point = stream.record()
    stream.close()
    stream.close()
    assert point.is_reached()
    for use in (stream.record, lambda: stream.launch(lambda: None), lambda: stream.wait(point)):
        with pytest.raises(RuntimeError, match="stream a is closed"):
            use()


def test_times_are_the_device_s_on_the_host_s_clock(emulated: CudaDevice) -> None:
    """Points that are looked at late were not reached late."""
    stream = emulated.stream("a")
    reach(stream.record())  # the clock's anchor
    the_emulation().delay(Operation.SET, fixed_us=20_000)
    word = emulated.driver.alloc(256)
    started = time.perf_counter_ns()
    start = stream.record()
    emulated.driver.memset_d32_async(word, 0, 1, stream.handle)
    end = stream.record()
    emulated.driver.synchronize(stream.handle)
    finished = time.perf_counter_ns()
    time.sleep(0.1)  # nobody looks
    assert started - 1_000_000 < start.reached_at_ns < end.reached_at_ns < finished + 1_000_000
    assert 20_000_000 <= end.reached_at_ns - start.reached_at_ns < 30_000_000
    stream.close()
    emulated.driver.free(word)


def test_the_clock_stays_with_the_host_s_over_many_anchors(emulated: CudaDevice) -> None:
    stream = emulated.stream("a")
    deadline = time.monotonic() + 1.2
    last = 0
    while time.monotonic() < deadline:
        before = time.perf_counter_ns()
        point = stream.record()
        reach(point)
        after = time.perf_counter_ns()
        assert before - 2_000_000 < point.reached_at_ns <= after
        assert point.reached_at_ns >= last
        last = point.reached_at_ns
        time.sleep(0.003)
    stream.close()
