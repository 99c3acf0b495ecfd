"""Streams and Points of a GPU."""

import ctypes
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from stages.cuda import CudaDevice, CudaPoint
from stages.device import HostStream
from stages.errors import CudaError, HeaderMismatch
from stages.kernels import Kernels
from tests.emulated_cuda import ILLEGAL_ADDRESS, Operation, emulation, the_emulation
from tests.gpu import Gate

HARMLESS = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value or 0  # a C function that may be called with anything


@pytest.fixture
def emulated_gate(emulated: CudaDevice) -> Iterator[Gate]:
    made = Gate(emulated)
    yield made
    made.close()


def ignore() -> None:
    pass


def wait_for(device: CudaDevice) -> None:
    """Poll until no callback is left."""
    deadline = time.monotonic() + 10
    while device.poll():
        assert time.monotonic() < deadline


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


def test_an_untold_point_is_told_of_when_somebody_waits_for_it(device: CudaDevice) -> None:
    stream = device.stream("a")
    called: list[str] = []
    first = stream.record(is_told=False)
    device.driver.synchronize(stream.handle)
    assert not first.is_reached(), "nothing told of it: else this test shows nothing"
    first.add_done_callback(lambda: called.append("first"))
    wait_for(device)
    assert called == ["first"]
    second, third = stream.record(is_told=False), stream.record()
    second.add_done_callback(lambda: called.append("second"))
    wait_for(device)
    assert called == ["first", "second"]
    assert third.is_reached()
    stream.close()


def test_callbacks_come_in_the_order_of_their_points(device: CudaDevice, gate: Gate) -> None:
    stream = device.stream("a")
    gate.stop(stream)
    points = [stream.record() for _ in range(20)]
    called: list[int] = []
    for i in random.Random(3).sample(range(20), 20):
        points[i].add_done_callback(lambda i=i: called.append(i))
    assert device.poll()
    gate.open()
    wait_for(device)
    assert called == list(range(20))
    stream.close()


def test_a_removed_callback_is_not_called_and_costs_nothing_more(device: CudaDevice, gate: Gate) -> None:
    stream = device.stream("a")
    gate.stop(stream)
    first, second = stream.record(), stream.record()
    called: list[str] = []

    def unwanted() -> None:
        called.append("unwanted")

    def wanted() -> None:
        called.append("wanted")

    first.add_done_callback(unwanted)
    second.add_done_callback(unwanted)
    second.add_done_callback(wanted)
    first.remove_done_callback(unwanted)
    first.remove_done_callback(unwanted)
    second.remove_done_callback(unwanted)
    assert device.poll()
    gate.open()
    wait_for(device)
    assert called == ["wanted"]
    second.remove_done_callback(wanted)
    stream.close()


def test_nothing_is_polled_once_the_last_callback_is_removed(device: CudaDevice, gate: Gate) -> None:
    stream = device.stream("a")
    gate.stop(stream)
    point = stream.record()
    point.add_done_callback(ignore)
    assert device.poll()
    point.remove_done_callback(ignore)
    assert not device.poll()
    gate.open()
    stream.close()


def test_one_host_function_of_a_stream_is_under_way_at_most(emulated: CudaDevice, emulated_gate: Gate) -> None:
    """However often awaits of a stuck stream are given up and begun again."""
    stream = emulated.stream("a")
    emulated_gate.stop(stream)
    points = [stream.record() for _ in range(3)]
    for i in range(300):
        point = points[i % 3]
        point.add_done_callback(ignore)
        emulated.arm(HARMLESS, 0)
        emulated.arm(HARMLESS, 0)
        point.remove_done_callback(ignore)
    assert the_emulation().count(Operation.HOST_FUNCTION) == 1
    emulated_gate.open()
    reach(points[-1])
    emulated_gate.stop(stream)
    stream.record().add_done_callback(ignore)
    emulated.arm(HARMLESS, 0)
    assert the_emulation().count(Operation.HOST_FUNCTION) == 2


def test_arming_a_broken_device_fails_its_streams(emulated: CudaDevice) -> None:
    stream, called = emulated.stream("a"), list[str]()
    emulated.driver.wait_value64(stream.handle, emulated.driver.alloc(256), 1)
    point = stream.record()
    point.add_done_callback(lambda: called.append("failed"))
    the_emulation().fail(ILLEGAL_ADDRESS)
    emulated.arm(HARMLESS, 0)
    assert not emulated.poll()
    assert called == ["failed"]
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        point.is_reached()
    stream.close()


def test_a_broken_device_closes_quietly() -> None:
    with emulation() as emulated:
        device = emulated.device()
        stream = device.stream("a")
        reach(stream.record())
        emulated.driver.wait_value64(stream.handle, device.driver.alloc(256), 1)
        stuck = stream.record()
        emulated.fail(ILLEGAL_ADDRESS)
        device.close()
        device.close()
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            stuck.is_reached()


def test_a_check_is_made_once_and_what_it_raises_fails_the_stream(device: CudaDevice) -> None:
    stream, checked = device.stream("a"), list[int]()
    good, bad = stream.record(), stream.record()
    good.set_check(lambda: checked.append(1))

    def refuse() -> None:
        raise HeaderMismatch("not the one that was announced")

    bad.set_check(refuse)
    reach(good)
    assert good.is_reached()
    assert checked == [1]
    for point in (stream.record(), bad):  # the later one first: nobody may have looked at the one with the check
        with pytest.raises(HeaderMismatch):
            reach(point)
    assert bad.reached_at_ns == 0
    assert good.is_reached()
    stream.close()


def test_points_may_outlive_their_device_and_be_dropped_by_any_thread(emulated: CudaDevice) -> None:
    with emulation() as other:
        device = other.device()
        stream = device.stream("a")
        kept, dropped = stream.record(), [stream.record() for _ in range(50)]
        reach(dropped[-1])
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join()
        assert len(device._events) == 49, "all but the one of the point that was found last"
        stream.close()
        device.close()
        assert kept.reached_at_ns > 0
        del kept
        assert device._events == []


def test_an_interpreter_ends_quietly_with_points_about() -> None:
    source = """
from tests.emulated_cuda import the_emulation
device = the_emulation().device()
stream = device.stream("a")
reached = stream.record()
while not reached.is_reached(): pass
device.driver.wait_value64(stream.handle, device.driver.alloc(256), 1)
stuck = stream.record()
stuck.add_done_callback(print)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- times ----------------------------------------------------------------------------------------------------------


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


def test_a_duration_is_the_device_s_however_late_anybody_looks(emulated: CudaDevice) -> None:
    stream, word = emulated.stream("a"), emulated.driver.alloc(256)
    the_emulation().delay(Operation.SET, fixed_us=5000)
    points = [stream.record()]
    for _ in range(6):
        emulated.driver.memset_d32_async(word, 0, 1, stream.handle)
        points.append(stream.record())
    emulated.driver.synchronize(stream.handle)
    for later in (4, 6, 1, 5, 2, 3):  # out of order, and some before anything else was seen of the device's clock
        assert 0.005 <= points[later].seconds_since(points[later - 1]) < 0.012
        assert points[later].reached_at_ns >= points[later - 1].reached_at_ns
        assert points[0].seconds_since(points[later]) == 0
    stream.close()
    emulated.driver.free(word)


def test_what_a_kernel_stamped_is_told_on_the_same_clock(emulated: CudaDevice) -> None:
    stream, kernels = emulated.stream("a"), Kernels(emulated.driver)
    verdict = emulated.driver.alloc(256)

    def stamped() -> CudaPoint:
        point, progress = stream.record_in_kernel()
        kernels.boundary(stream.handle, 0, b"", 0, b"", verdict, verdict, progress)
        return point

    the_emulation().delay(Operation.SET, fixed_us=5000)
    before = time.perf_counter_ns()
    start = stamped()
    emulated.driver.memset_d32_async(verdict, 1, 1, stream.handle)
    end, recorded = stamped(), stream.record()
    reach(recorded)
    assert 0.005 <= end.seconds_since(start) < 0.012
    assert before <= start.reached_at_ns < end.reached_at_ns <= (after := time.perf_counter_ns())
    assert 0 <= recorded.seconds_since(end) < 0.005  # an event's: placed by another clock
    first, others = stamped(), [stamped() for _ in range(300)]
    reach(others[-1])
    others_seen = time.perf_counter_ns()
    assert first.reached_at_ns >= others_seen, "its stamp was written over: when it was seen"
    assert first.seconds_since(start) > 0
    stream.close()
    assert end.reached_at_ns <= after
    emulated.driver.free(verdict)
