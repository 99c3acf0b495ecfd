"""Streams and Points of a GPU. No torch.

A Point is an event and a number. The event orders other streams after it on the device and tells when it was reached;
the number is written by the stream to a word in pinned memory, where the host sees it for the price of a load.

All of this belongs to the one thread that enqueues: a rank with a GPU has no other Python thread.
"""

# pyright: strict

import ctypes
import time
from bisect import insort
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from stages.device import DoneCallback, Point, Poller, Stream
from stages.driver import NOT_READY, Driver, MemoryOp, memory_ops
from stages.errors import CudaError
from stages.kernels import Progress

_MAX_STREAMS = 64
_NUM_STAMPS = 255  # of a stream, used in turn: far more points than a stream can have in flight
_AREA_BYTES = 8 * (1 + _NUM_STAMPS)  # of a stream in pinned memory: its word, then its stamps
_CLOSE_POLL_SECONDS = 0.0002
_ANCHOR_SECONDS = 0.25  # how long one anchor of the clock serves: an elapsed time is a float32 of milliseconds
_MAX_ANCHOR_SECONDS = 2.0
_MAX_DRIFT = 1e-4  # of the device's clock against the host's

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
        self._clock: _Clock | None = None
        self._stamp_clock = _StampClock()

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
        is_pending = False
        for stream in self._streams:
            if stream.has_callbacks:
                is_pending |= stream.call_back()
        return is_pending

    def arm(self, function: int, argument: int) -> None:
        for stream in self._streams:
            if stream.has_callbacks:
                stream.arm(function, argument)

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
        self._clock = None
        while self._events:
            self.driver.destroy_event(self._events.pop())
        self.free_retired()
        if self._page:
            self.driver.destroy_stream(self.rescue)
            self._words.release()
            self.driver.free_host(self._page)
            self._page = 0

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

    def forget(self, stream: "CudaStream", index: int) -> None:
        self._streams.remove(stream)
        self._unused_areas.append(index // (_AREA_BYTES // 8))

    def take_event(self) -> int:
        return self._events.pop() if self._events else self.driver.create_event()

    def give_event(self, event: int) -> None:
        """An event may be recorded anew while streams still wait for what it stood for."""
        self._events.append(event)

    def host_time_ns(self, point: "CudaPoint", observed_ns: int) -> int:
        """When a reached Point was reached, on the host's clock; ``observed_ns`` is a time when it had been."""
        if point.stamp_index:
            return self._stamp_clock.time_of(self._words[point.stamp_index], observed_ns)
        if self._clock is None:
            self._clock = _Clock(self.driver, point, observed_ns)
        return self._clock.time_of(point, observed_ns)


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
        self._area, self._word_index = device.take_area()
        self._ops = memory_ops([MemoryOp.write(0, 0), MemoryOp.write(self._area, 0)])
        self._callbacks: list[tuple[int, int, CudaPoint, DoneCallback]] = []  # in the order of their Points
        self._num_callbacks = 0
        self._armed_sequence = 0
        self._is_closed = False

    def launch(self, fn: Callable[[], None]) -> None:
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
        return CudaPoint(self, event, self._sequence)

    def record_in_kernel(self) -> "tuple[CudaPoint, Progress]":
        """The Point that the kernel launched next on this stream makes itself, and what to tell that kernel."""
        self._check_open()
        self._sequence += 1
        stamp = 1 + self._sequence % _NUM_STAMPS
        point = CudaPoint(self, 0, self._sequence)
        point.stamp_index = self._word_index + stamp
        return point, (self._area, self._sequence, self._area + 8 * stamp)

    def record_with(self, address: int, value: int) -> "CudaPoint":
        """Store ``value`` at ``address``, as soon as everything before it is visible, and record a Point behind it."""
        self._check_open()
        self._sequence += 1
        store, progress = self._ops
        store.address, store.value, progress.value = address, value, self._sequence
        self._driver.batch_memory_ops(self.handle, self._ops)
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
        self.device.forget(self, self._word_index)

    # ---- what its Points and its device use -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """The number of the last Point that is reached."""
        return self.device.read_word(self._word_index) if not self._is_closed else self._sequence

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def add_callback(self, point: "CudaPoint", fn: DoneCallback) -> None:
        self._num_callbacks += 1
        insort(self._callbacks, (point.sequence, self._num_callbacks, point, fn))

    def call_back(self) -> bool:
        """Call what is due; whether anything is left."""
        progress = self.progress
        while self._callbacks and (self.error is not None or self._callbacks[0][0] <= progress):
            self._callbacks.pop(0)[3]()
        return bool(self._callbacks)

    def arm(self, function: int, argument: int) -> None:
        sequence, _, point, _ = self._callbacks[0]
        if sequence != self._armed_sequence and self.error is None:
            self._armed_sequence = sequence
            self._driver.stream_wait_event(self._notifier, point.event)
            self._driver.launch_host_func(self._notifier, function, argument)

    def _run(self, fn: Callable[[], None]) -> None:
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
    """``check``, when set, is called once when the Point is found reached; what it raises fails the stream and this Point."""

    __slots__ = ("_error", "_event", "_reached_at_ns", "check", "sequence", "stamp_index", "stream")

    def __init__(self, stream: CudaStream, event: int, sequence: int) -> None:
        self.stream = stream
        self.sequence = sequence
        self.stamp_index = 0
        self._event = event
        self.check: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._reached_at_ns = 0

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
        return self._reached_at_ns != 0 or self.stream.progress >= self.sequence

    @property
    def failure(self) -> BaseException | None:
        """What it raises, as far as is known now."""
        return self._error or (self.stream.error if self._reached_at_ns == 0 else None)

    @property
    def stream_name(self) -> str:
        return self.stream.name

    @property
    def poller(self) -> Poller:
        return self.stream.device

    def is_reached(self) -> bool:
        if self._reached_at_ns == 0 and self._error is None:
            self._observe()
        if self._error is not None:
            raise self._error
        return self._reached_at_ns != 0

    def add_done_callback(self, fn: DoneCallback) -> None:
        if self._reached_at_ns == 0 and self._error is None:
            self._observe()
        if self._reached_at_ns or self._error is not None:
            fn()
        else:
            self.stream.add_callback(self, fn)

    @property
    def reached_at_ns(self) -> int:
        if self._reached_at_ns == 0 and self._error is None:
            self._observe()
        return self._reached_at_ns

    def _observe(self) -> None:
        is_past = self.stream.progress >= self.sequence  # before the error, which is set before the stream goes on
        if self.stream.error is not None:  # also when it was passed since: what a broken wait let through is no result
            self._error = self.stream.error
        elif is_past:
            self._reached_at_ns = self.stream.device.host_time_ns(self, time.perf_counter_ns())
            if self.check is not None:
                try:
                    self.check()
                except Exception as exc:  # noqa: BLE001  kept, and raised by this Point and every later one
                    self._error = exc
                    self.stream.fail(exc)


class _StampClock:
    """Places the GPU's own time on the host's clock.

    What a kernel stamped was seen by the host a little later: the least such lag of the last seconds is taken for none.
    """

    def __init__(self) -> None:
        self._until_ns = 0
        self._offset_ns = self._last_offset_ns = 1 << 63

    def time_of(self, stamp_ns: int, observed_ns: int) -> int:
        if observed_ns > self._until_ns:
            self._until_ns = observed_ns + round(_MAX_ANCHOR_SECONDS * 1e9)
            self._last_offset_ns, self._offset_ns = self._offset_ns, 1 << 63
        self._offset_ns = min(self._offset_ns, observed_ns - stamp_ns)
        return stamp_ns + min(self._offset_ns, self._last_offset_ns)


class _Clock:
    """Places events on the host's clock.

    Times are counted from an anchor, an event whose host time is taken as known. A Point cannot have been reached after it
    was seen to be: where the count says so, or stays behind by more than the clocks' drift explains, the next anchor is
    moved by what the best observation since the last one shows.
    """

    def __init__(self, driver: Driver, anchor: CudaPoint, host_ns: int) -> None:
        self._driver = driver
        self._anchor = anchor
        self._anchor_ns = host_ns
        self._least_lag_ns = _MAX_ANCHOR_SECONDS * 1e9

    def time_of(self, point: CudaPoint, observed_ns: int) -> int:
        try:
            elapsed_ns = self._driver.elapsed_ms(self._anchor.event, point.event) * 1e6
        except CudaError as exc:
            if exc.code != NOT_READY:  # the event comes behind the word where that is quicker for the stream
                raise
            return observed_ns
        if elapsed_ns > _MAX_ANCHOR_SECONDS * 1e9:
            self._move(point, observed_ns)
            return observed_ns
        counted_ns = self._anchor_ns + round(elapsed_ns)
        self._least_lag_ns = min(self._least_lag_ns, observed_ns - counted_ns)
        if elapsed_ns > _ANCHOR_SECONDS * 1e9:
            counted_ns += round(min(self._least_lag_ns, elapsed_ns * _MAX_DRIFT))
            self._move(point, counted_ns)
        return min(counted_ns, observed_ns)

    def _move(self, anchor: CudaPoint, host_ns: int) -> None:
        self._anchor = anchor
        self._anchor_ns = host_ns
        self._least_lag_ns = _MAX_ANCHOR_SECONDS * 1e9
