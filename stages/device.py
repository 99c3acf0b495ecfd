"""Streams and Points: the order of work on a device, and places in that order that can be waited for.

``HostStream`` is one thread that runs callables in order, so that the orchestrator, the transports and their
races are the same with and without a GPU. ``stages.cuda`` has the streams of a GPU.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

DoneCallback = Callable[[], None]
Launch = Callable[[], int | None]
"""Returns when it had waited for what it needs of a peer (``Point.waited_until_ns``), or None."""


class Point(ABC):
    """A place in a stream's order, reached when everything enqueued before it has run."""

    __slots__ = ()

    @abstractmethod
    def is_reached(self) -> bool:
        """Never blocks. Raises the stream's (sticky) error when the stream failed before this Point."""

    @abstractmethod
    def add_done_callback(self, fn: DoneCallback) -> None:
        """Call ``fn()`` once the Point is reached or its stream failed.

        At once when it already is, else from the stream's thread. ``fn`` must neither block nor raise.
        """

    @abstractmethod
    def remove_done_callback(self, fn: DoneCallback) -> None:
        """Forget one ``fn`` that was added; nothing happens when it was called already, or is being called."""

    @property
    @abstractmethod
    def reached_at_ns(self) -> int:
        """``time.perf_counter_ns()`` when the Point was reached; 0 before that.

        A GPU's own time, placed on the host's clock to some microseconds: take durations from ``seconds_since``.
        """

    def seconds_since(self, start: "Point") -> float:
        """How long after ``start`` this Point was reached, both being reached; at least 0. By a GPU's own clock where one
        clock saw both."""
        return max(self.reached_at_ns - start.reached_at_ns, 0) / 1e9

    @property
    def waited_until_ns(self) -> int:
        """``time.perf_counter_ns()`` when the stream last went on after it had waited for a peer, before this Point; 0 where
        nobody can tell, as on a GPU."""
        return 0

    @property
    @abstractmethod
    def stream_name(self) -> str: ...

    @property
    def poller(self) -> "Poller | None":
        """What must be polled for this Point's callbacks to be called; None when its stream calls them by itself."""
        return None


class Poller(ABC):
    """Streams that tell nobody when a Point is reached. All calls from the one thread that enqueues on them."""

    @abstractmethod
    def poll(self) -> bool:
        """Call the callbacks of the Points that are reached or failed; cheap. Whether callbacks are left."""

    @abstractmethod
    def arm(self, function: int, argument: int) -> None:
        """Have the C function at address ``function``, ``void (void *)``, called with ``argument`` once the next Point of any
        stream that has callbacks left is reached. From a thread of the driver, at least once; never after a device error.
        Raises nothing."""

    @abstractmethod
    def check(self) -> None:
        """Look for a device error, which no progress would tell of, and fail every stream with it. Does not raise it."""


class Stream(ABC):
    """An order of work on a device."""

    name: str

    @abstractmethod
    def launch(self, fn: Launch) -> None:
        """Enqueue ``fn`` in the stream's order; never blocks. ``fn`` keeps what it refers to alive until it has run."""

    @abstractmethod
    def record(self, *, is_told: bool = True) -> Point:
        """The Point after everything enqueued so far.

        One that is not ``is_told`` is cheaper on a GPU, and found reached only with the next that is.
        """

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Order everything enqueued from now on after ``point``; the caller does not wait.

        A stream that waits for a Point of a failed stream fails with the same error.
        """

    @property
    @abstractmethod
    def is_closed(self) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Run what is enqueued, then end. May be called twice. Whoever enqueued a wait for a peer poisons it first."""


class HostPoint(Point):
    __slots__ = ("_callbacks", "_error", "_lock", "_reached_at_ns", "_stream_name", "_waited_until_ns")

    def __init__(self, stream_name: str) -> None:
        self._stream_name = stream_name
        self._lock = threading.Lock()
        self._callbacks: list[DoneCallback] = []
        self._error: BaseException | None = None
        self._reached_at_ns = 0
        self._waited_until_ns = 0

    def is_reached(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._reached_at_ns != 0

    def add_done_callback(self, fn: DoneCallback) -> None:
        with self._lock:
            if self._reached_at_ns == 0:
                self._callbacks.append(fn)
                return
        fn()

    def remove_done_callback(self, fn: DoneCallback) -> None:
        with self._lock:
            if fn in self._callbacks:
                self._callbacks.remove(fn)

    @property
    def reached_at_ns(self) -> int:
        return self._reached_at_ns

    @property
    def waited_until_ns(self) -> int:
        return self._waited_until_ns

    @property
    def stream_name(self) -> str:
        return self._stream_name

    def _settle(self, error: BaseException | None, waited_until_ns: int) -> None:
        with self._lock:
            self._error = error
            self._waited_until_ns = waited_until_ns
            self._reached_at_ns = time.perf_counter_ns()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn()


class HostStream(Stream):
    """A thread that runs callables in order.

    The first exception is sticky: what follows is skipped and every later Point raises it. The queue has no bound
    of its own: its users enqueue a handful of callables a step, and at most lane depth + 1 steps are planned.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Launch | HostPoint | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, fn: Launch) -> None:
        self._put(fn)

    def record(self, *, is_told: bool = True) -> HostPoint:
        point = HostPoint(self.name)
        self._put(point)
        return point

    def wait(self, point: Point) -> None:
        self._put(lambda: _block_until(point))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, item: Launch | HostPoint) -> None:
        if self._is_closed:
            raise RuntimeError(f"stream {self.name} is closed")
        self._queue.put(item)

    def _run(self) -> None:
        waited_until_ns = 0
        while (item := self._queue.get()) is not None:
            if isinstance(item, HostPoint):
                item._settle(self._error, waited_until_ns)  # pyright: ignore[reportPrivateUsage]
            elif self._error is None:
                try:
                    waited_until_ns = item() or waited_until_ns
                except BaseException as exc:  # noqa: BLE001  the stream's edge: kept, and raised by every later Point
                    self._error = exc
            item = None  # a finished callable's tensors are freed now, not when the next one comes


def _block_until(point: Point) -> None:
    """Block the calling thread until ``point`` is reached; raises its stream's error."""
    if point.is_reached():
        return
    gate = threading.Lock()
    gate.acquire()
    point.add_done_callback(gate.release)
    gate.acquire()
    point.is_reached()
