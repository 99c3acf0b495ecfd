"""Streams and Points of a GPU. No torch.

A Point is an event and a number. The event orders other streams after it on the device and tells when it was reached;
the number is written by the stream to a word in pinned memory, where the host sees it for the price of a load.

All of this belongs to the one thread that enqueues: a rank with a GPU has no other Python thread.
"""

# pyright: strict

import ctypes
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

from stages.clock import HostClock
from stages.device import DoneCallback, Launch, Point, Poller, Stream
from stages.driver import Driver, MemoryOp, memory_ops
from stages.errors import CudaError
from stages.kernels import Progress

_MAX_STREAMS = 64
_NUM_STAMPS = 255  # of a stream, used in turn: far more points than a stream can have in flight
_AREA_BYTES = 8 * (1 + _NUM_STAMPS)  # of a stream in pinned memory: its word, then its stamps
_CLOSE_POLL_SECONDS = 0.0002
_ANCHOR_NS = 250_000_000  # how long one event serves to count from: an elapsed time is a float32 of milliseconds
_SEQUENCE = attrgetter("sequence")

Enqueue = Callable[[int, Callable[[], None]], None]
"""Has a callable that enqueues work on a stream (its handle) do so."""


class CudaDevice(Poller):
    """A GPU as one rank uses it: its streams, and the events they share.

    ``enqueue`` replaces how ``CudaStream.launch`` runs a callable; by default it is called at once, as what it calls
    enqueues by itself.
    """

    def __init__(self, driver: Driver, ordinal: int = 0, enqueue: Enqueue | None = None) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.enqueue = enqueue
        driver.make_current(ordinal)
        self._page = driver.alloc_host(_AREA_BYTES * _MAX_STREAMS)
        ctypes.memset(self._page, 0, _AREA_BYTES * _MAX_STREAMS)
        words = (ctypes.c_uint64 * (_AREA_BYTES // 8 * _MAX_STREAMS)).from_address(self._page)
        self.rescue = driver.create_stream()  # never waits: what is written on it breaks the waits of the others
        self._words = memoryview(words).cast("B").cast("Q")
        self._unused_areas = list(range(_MAX_STREAMS))
        self._events: list[int] = []
        self._retired: list[int] = []
        self._streams: list[CudaStream] = []
        self._awaited: list[CudaStream] = []  # those that have callbacks
        self.last_found: CudaPoint | None = None  # the newest Point that somebody waited for
        self._event_times = _EventTimes(driver)
        self._event_clock = HostClock()
        self._stamp_clock = HostClock()

    def stream(
        self, name: str, handle: int | None = None, scope: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> "CudaStream":
        """A new stream. Make all of them before the first wait for a peer: creating one may synchronise the device.

        ``handle`` is one that outlives it, None for one of its own. ``scope`` is entered around what ``launch`` calls, as the
        scope in which torch enqueues on the stream.
        """
        stream = CudaStream(self, name, handle, scope)
        self._streams.append(stream)
        return stream

    def poll(self) -> bool:
        words = self._words
        for stream in self._awaited:
            if words[stream.word_index] >= stream.awaited_sequence or stream.error is not None:
                break
        else:
            return bool(self._awaited)
        for stream in list(self._awaited):
            stream.call_back()
        return bool(self._awaited)

    def arm(self, function: int, argument: int) -> None:
        try:
            for stream in self._awaited:
                stream.arm(function, argument)
        except CudaError as exc:
            self.fail(exc)

    def check(self) -> None:
        try:
            for stream in self._streams:
                self.driver.is_idle(stream.handle)
        except CudaError as exc:
            self.fail(exc)

    def fail(self, error: BaseException) -> None:
        """Fail every stream."""
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> None:
        """After every stream was closed. Leaves the device's context, which torch uses, alone."""
        for stream in list(self._streams):
            stream.close()
        if not self._page:
            return
        self.last_found = None
        self._event_times.forget()
        page, self._page = self._page, 0
        self._words.release()
        try:
            while self._events:
                self.driver.destroy_event(self._events.pop())
            self.free_retired()
            self.driver.destroy_stream(self.rescue)
            self.driver.free_host(page)
        except CudaError:
            pass  # the context is gone, and what lived in it with it

    def retire(self, *addresses: int) -> None:
        """Memory that peers may still write to: freed by ``free_retired``, once they have stopped."""
        self._retired += addresses

    def free_retired(self) -> None:
        while self._retired:
            self.driver.free(self._retired.pop())

    # ---- what its streams use ---------------------------------------------------------------------------------------

    def take_area(self) -> tuple[int, int]:
        """The address of a stream's word and stamps in pinned memory, and the word's index."""
        if not self._unused_areas:
            raise CudaError(f"more than {_MAX_STREAMS} streams on device {self.ordinal}")
        index = self._unused_areas.pop() * (_AREA_BYTES // 8)
        self._words[index] = 0
        return self._page + index * 8, index

    def read_word(self, index: int) -> int:
        return self._words[index]

    def set_awaited(self, stream: "CudaStream", *, is_awaited: bool) -> None:
        """Whether ``poll`` has to look at ``stream``."""
        if is_awaited:
            self._awaited.append(stream)
        else:
            self._awaited.remove(stream)

    def forget(self, stream: "CudaStream", index: int) -> None:
        self._streams.remove(stream)
        self._unused_areas.append(index // (_AREA_BYTES // 8))

    def take_event(self) -> int:
        return self._events.pop() if self._events else self.driver.create_event()

    def give_event(self, event: int) -> None:
        """An event may be recorded anew while streams still wait for what it stood for. From any thread."""
        if self._page:  # the events of Points that outlive their device are left to the context
            self._events.append(event)

    def time_of(self, point: "CudaPoint", seen_ns: int) -> tuple[int, int]:
        """When a reached Point was reached, on the device's clock and on the host's; it was seen reached at ``seen_ns``.

        The device's is 0 when it is not known, and the host's ``seen_ns`` then.
        """
        if not self._page:
            return 0, seen_ns
        found, self.last_found = self.last_found, None
        if found is not None:
            _ = found.reached_at_ns  # first: it was seen promptly, as others perhaps were not
        if not point.stamp_index:
            device_ns, clock = self._event_times.of(point), self._event_clock
        elif point.stream.has_stamp(point):
            device_ns, clock = self._words[point.stamp_index], self._stamp_clock
        else:
            return 0, seen_ns
        return device_ns, clock.place(device_ns, seen_ns) if device_ns else seen_ns


class CudaStream(Stream):
    """``launch`` calls its callable at once, on the caller's thread: what it calls enqueues by itself."""

    def __init__(
        self,
        device: CudaDevice,
        name: str,
        handle: int | None,
        scope: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._driver = device.driver
        self.device = device
        self.name = name
        self.handle = self._driver.create_stream() if handle is None else handle
        self.error: BaseException | None = None
        self._notifier = self._driver.create_stream()  # waits for a Point of ours and then calls the host: ours never does
        self._own_handles = [self._notifier, *([self.handle] if handle is None else [])]
        self._scope = scope
        self._sequence = 0
        self._told_sequence = 0  # the last that the stream writes to its word
        self._area, self.word_index = device.take_area()
        self._ops = memory_ops([MemoryOp.write(0, 0), MemoryOp.write(self._area, 0)])
        self._awaited: list[CudaPoint] = []  # Points that have callbacks, in their order
        self._checks: deque[tuple[int, Callable[[], None]]] = deque()  # those of the steps in flight, in their order
        self.awaited_sequence = 0  # of the first of them
        self._armed_sequence = 0
        self._is_closed = False

    def launch(self, fn: Launch) -> None:
        self._check_open()
        if self.device.enqueue is None:
            self._run(fn)
        else:
            self.device.enqueue(self.handle, lambda: self._run(fn))

    def record(self, *, is_told: bool = True) -> "CudaPoint":
        self._check_open()
        event = self.device.take_event()
        self._driver.event_record(event, self.handle)
        self._sequence += 1
        if is_told:
            self._driver.write_value64(self.handle, self._area, self._sequence)
            self._told_sequence = self._sequence
        return CudaPoint(self, event, self._sequence)

    def record_in_kernel(self) -> "tuple[CudaPoint, Progress]":
        """The Point that the kernel launched next on this stream makes itself, and what to tell that kernel."""
        self._check_open()
        self._sequence += 1
        self._told_sequence = self._sequence
        stamp = 1 + self._sequence % _NUM_STAMPS
        point = CudaPoint(self, 0, self._sequence)
        point.stamp_index = self.word_index + stamp
        return point, (self._area, self._sequence, self._area + 8 * stamp)

    def record_with(self, address: int, value: int) -> "CudaPoint":
        """Store ``value`` at ``address``, as soon as everything before it is visible, and record a Point behind it."""
        self._check_open()
        self._sequence += 1
        store, progress = self._ops
        store.address, store.value, progress.value = address, value, self._sequence
        self._driver.batch_memory_ops(self.handle, self._ops)
        self._told_sequence = self._sequence
        event = self.device.take_event()
        self._driver.event_record(event, self.handle)
        return CudaPoint(self, event, self._sequence)

    def wait(self, point: Point) -> None:
        if not isinstance(point, CudaPoint):
            raise TypeError(f"stream {self.name} of a GPU cannot wait for a {type(point).__name__}")
        self._check_open()
        if (error := point.failure) is not None:
            self.fail(error)
        elif point.stream is not self and not point.is_past:
            self._driver.stream_wait_event(self.handle, point.event)

    def fail(self, error: BaseException) -> None:
        """Every Point that is not reached yet, and every later one, raises ``error``; the first error stays."""
        if self.error is None:
            self.error = error

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for handle in (self.handle, self._notifier):
                while not self._driver.is_idle(handle):
                    time.sleep(_CLOSE_POLL_SECONDS)
            self.call_back()
            for handle in self._own_handles:
                self._driver.destroy_stream(handle)
        except CudaError as exc:  # the context is gone, and what lived in it with it
            self.fail(exc)
            self.call_back()
        self.device.forget(self, self.word_index)

    # ---- what its Points and its device use -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """The number of the last Point that is reached."""
        return self.device.read_word(self.word_index) if not self._is_closed else self._sequence

    @property
    def has_callbacks(self) -> bool:
        return bool(self._awaited)

    def has_stamp(self, point: "CudaPoint") -> bool:
        """Whether the time that a kernel stamped is still there: it is written over after a while."""
        return not self._is_closed and self._sequence - point.sequence < _NUM_STAMPS

    def add_check(self, point: "CudaPoint", check: Callable[[], None]) -> None:
        assert not self._checks or self._checks[-1][0] <= point.sequence, "checks are made in the stream's order"
        self._checks.append((point.sequence, check))

    def run_checks(self, sequence: int) -> None:
        """Those of the Points up to ``sequence``, all of which are reached."""
        while self._checks and self._checks[0][0] <= sequence:
            _, check = self._checks.popleft()
            if self.error is None:
                try:
                    check()
                except Exception as exc:  # noqa: BLE001  kept, and raised by this Point and every later one
                    self.fail(exc)

    def add_callback(self, point: "CudaPoint", fn: DoneCallback) -> None:
        if point.callbacks:
            point.callbacks.append(fn)
            return
        if point.sequence > self._told_sequence:  # nothing enqueued so far would tell of it
            self._driver.write_value64(self.handle, self._area, self._sequence)
            self._told_sequence = self._sequence
        point.callbacks = [fn]
        if not self._awaited:
            self.device.set_awaited(self, is_awaited=True)
        self._awaited.insert(bisect_right(self._awaited, point.sequence, key=_SEQUENCE), point)
        self.awaited_sequence = self._awaited[0].sequence

    def remove_callback(self, point: "CudaPoint", fn: DoneCallback) -> None:
        if fn in point.callbacks:
            point.callbacks.remove(fn)
            if not point.callbacks:
                del self._awaited[bisect_left(self._awaited, point.sequence, key=_SEQUENCE)]
                self._awaited_changed()

    def call_back(self) -> None:
        """Call what is due."""
        points = self._awaited
        num_due = len(points) if self.error is not None else bisect_right(points, self.progress, key=_SEQUENCE)
        if num_due:
            self._awaited = points[num_due:]
            self._awaited_changed()
            for point in points[:num_due]:
                callbacks, point.callbacks = point.callbacks, []
                for fn in callbacks:
                    fn()

    def arm(self, function: int, argument: int) -> None:
        # One at a time: what is armed for a later Point cannot be taken back, and the notifier would come by no sooner.
        if self.error is None and self.progress >= self._armed_sequence:
            # For the word, not the event: the host function must not be called before the host can see the progress.
            self._driver.wait_value64(self._notifier, self._area, self.awaited_sequence)
            self._driver.launch_host_func(self._notifier, function, argument)
            self._armed_sequence = self.awaited_sequence

    def _awaited_changed(self) -> None:
        if self._awaited:
            self.awaited_sequence = self._awaited[0].sequence
        else:
            self.device.set_awaited(self, is_awaited=False)

    def _run(self, fn: Launch) -> None:
        if self.error is not None:
            return
        try:
            with self._scope():
                fn()
        except Exception as exc:  # noqa: BLE001  the stream's edge: kept, and raised by every later Point
            self.fail(exc)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"stream {self.name} is closed")


class CudaPoint(Point):
    __slots__ = (
        "_device_ns",
        "_error",
        "_event",
        "_reached_at_ns",
        "_seen_ns",
        "callbacks",
        "sequence",
        "stamp_index",
        "stream",
    )

    def __init__(self, stream: CudaStream, event: int, sequence: int) -> None:
        self.stream = stream
        self.sequence = sequence
        self.stamp_index = 0
        self._event = event
        self.callbacks: list[DoneCallback] = []  # kept by the stream
        self._error: BaseException | None = None
        self._seen_ns = 0  # when it was found reached or failed
        self._device_ns = self._reached_at_ns = 0

    def __del__(self) -> None:
        if self._event:
            self.stream.device.give_event(self._event)

    @property
    def event(self) -> int:
        """For other streams to wait for. Of a Point that a kernel makes it is recorded now, so it may come somewhat later."""
        if not self._event:
            self._event = self.stream.device.take_event()
            self.stream.device.driver.event_record(self._event, self.stream.handle)
        return self._event

    @property
    def is_past(self) -> bool:
        """Whether the stream has come by, whatever its errors."""
        return self._seen_ns != 0 or self.stream.progress >= self.sequence

    @property
    def failure(self) -> BaseException | None:
        """What it raises, as far as is known now."""
        return self._error or (self.stream.error if self._seen_ns == 0 else None)

    @property
    def stream_name(self) -> str:
        return self.stream.name

    @property
    def poller(self) -> Poller:
        return self.stream.device

    def is_reached(self) -> bool:
        if self._seen_ns == 0:
            self._look()
            if self._seen_ns:
                self.stream.device.last_found = self
        if self._error is not None:
            raise self._error
        return self._seen_ns != 0

    def add_done_callback(self, fn: DoneCallback) -> None:
        if self._seen_ns == 0:
            self._look()
        if self._seen_ns:
            fn()
        else:
            self.stream.add_callback(self, fn)

    def remove_done_callback(self, fn: DoneCallback) -> None:
        self.stream.remove_callback(self, fn)

    def set_check(self, check: Callable[[], None]) -> None:
        """Have ``check`` called once, before this Point or any later one of its stream is found reached. What it raises fails
        the stream, and them. Points of a stream are given their checks in order."""
        self.stream.add_check(self, check)

    @property
    def reached_at_ns(self) -> int:
        if self._seen_ns == 0:
            self._look()
        if self._reached_at_ns == 0 and self._seen_ns and self._error is None:  # not while somebody waits to be woken
            self._device_ns, self._reached_at_ns = self.stream.device.time_of(self, self._seen_ns)
        return self._reached_at_ns

    def seconds_since(self, start: Point) -> float:
        if self.reached_at_ns and start.reached_at_ns and isinstance(start, CudaPoint):
            is_one_clock = self.stream.device is start.stream.device and bool(self.stamp_index) == bool(start.stamp_index)
            if is_one_clock and self._device_ns and start._device_ns:
                return max(self._device_ns - start._device_ns, 0) / 1e9
        return super().seconds_since(start)

    def _look(self) -> None:
        is_past = self.stream.progress >= self.sequence  # before the error, which is set before the stream goes on
        if is_past:
            self.stream.run_checks(self.sequence)
        self._error = self.stream.error  # also when it was passed since: what a broken wait let through is no result
        if is_past or self._error is not None:
            self._seen_ns = time.perf_counter_ns()


class _EventTimes:
    """When events were reached, in nanoseconds from some time; CUDA tells only what lies between two."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._anchor: CudaPoint | None = None
        self._anchor_ns = 0

    def of(self, point: CudaPoint) -> int:
        """0 when that is not known: the event of a reached Point may still be under way, where it comes behind the word."""
        try:
            if self._anchor is None:
                if not self._driver.is_done(point.event):
                    return 0
                self._anchor, self._anchor_ns = point, time.perf_counter_ns()
            elapsed_ns = round(self._driver.elapsed_ms(self._anchor.event, point.event) * 1e6)
        except CudaError:  # not ready yet, or the device is gone, which its streams tell
            return 0
        device_ns = self._anchor_ns + elapsed_ns
        if elapsed_ns > _ANCHOR_NS:
            self._anchor, self._anchor_ns = point, device_ns
        return device_ns

    def forget(self) -> None:
        """Give the anchor's event back."""
        self._anchor = None
