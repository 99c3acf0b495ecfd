"""Turns Points into awaitables.

A host stream settles its Points from its own thread. A GPU tells nobody: its Points are looked for. While one is awaited the
loop looks in every turn, for ``spin_us`` since the last one was found, which costs a core and wakes within a microsecond. Then
it parks: the next Point of each stream gets a host function that calls ``uv_async_send``, and the loop sleeps. Every 20 ms it
looks for device errors, after which no host function is called any more. When nothing is awaited nothing runs.
"""

import asyncio
import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, MutableSequence

import uvloop

from stages.device import Point, Poller
from stages.errors import DeadlinePassed

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.02
LOOKS_PER_TURN = 8  # a look costs a third of a microsecond, a turn of the loop more than one
PARKED_POLL_SECONDS = 0.001  # on a loop that no host function can wake

WAKE_MODES = ("spin", "park", "timer")
"""The loop looked, it slept and was woken, the safety net found it. Host streams always wake it."""
_SPIN, _PARK, _TIMER = range(3)


class Waker:
    """Wakes the coroutines of one loop when their Points are reached.

    ``counts`` are counted up, by how the loop came to see a Point that was awaited: as ``WAKE_MODES``.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, spin_us: int = 0, counts: MutableSequence[int] | memoryview | None = None
    ) -> None:
        self._loop = loop
        self._spin_ns = spin_us * 1000
        # One entry for each Point somebody awaits and that is reached: bounded by the tasks of the steps in flight.
        self._settled: deque[tuple[asyncio.Future[None], Point]] = deque()
        self._is_wake_scheduled = False
        self._is_closed = False
        self._counts: MutableSequence[int] | memoryview = [0, 0, 0] if counts is None else counts
        self._mode = _SPIN
        self._pollers: list[Poller] = []  # with Points that are awaited
        self._is_spinning = False
        self._spins_until_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._bell: _Bell | None = None

    @property
    def wakes(self) -> dict[str, int]:
        """What was counted so far, by mode."""
        return dict(zip(WAKE_MODES, self._counts, strict=True))

    async def reached(self, point: Point, deadline_seconds: float | None = None) -> bool:
        """Return once ``point`` is reached, and whether that had to be waited for; raises its stream's error, or
        ``DeadlinePassed``.

        Cancelling this await, or its deadline, changes nothing for the stream: the buffers stay owned by it until the Point is
        reached. Nothing of the await is left with the Point.
        """
        if point.is_reached():
            return False
        future: asyncio.Future[None] = self._loop.create_future()
        poller = point.poller
        settle = self._settle if poller is None else self._find

        def done() -> None:
            settle(future, point)

        point.add_done_callback(done)
        if poller is not None and not future.done():
            self._look_at(poller)
        deadline = None
        if deadline_seconds is not None:
            deadline = self._loop.call_later(deadline_seconds, _give_up, future, point, deadline_seconds)
        try:
            await future
        except BaseException:
            point.remove_done_callback(done)
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
        return True

    def close(self) -> None:
        """Points reached from now on wake nobody; whoever still awaits one must be cancelled."""
        self._is_closed = True
        self._pollers.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._bell is not None:
            self._bell.close()

    # ---- host streams: they call, from their threads ----------------------------------------------------------------

    def _settle(self, future: asyncio.Future[None], point: Point) -> None:
        self._settled.append((future, point))
        # Cleared before the deque is drained: an entry added meanwhile schedules another wake, never none.
        if not self._is_wake_scheduled and not self._is_closed:
            self._is_wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_wake_scheduled = False
        while self._settled:
            self._counts[_PARK] += 1
            _resolve(*self._settled.popleft())

    # ---- GPUs: we look, on the loop -----------------------------------------------------------------------------------

    def _find(self, future: asyncio.Future[None], point: Point) -> None:
        self._counts[self._mode] += 1
        self._spins_until_ns = 0  # another one may follow at once: set anew
        _resolve(future, point)

    def _look_at(self, poller: Poller) -> None:
        if poller not in self._pollers:
            self._pollers.append(poller)
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)
        self._spin()

    def _spin(self) -> None:
        self._spins_until_ns = time.perf_counter_ns() + self._spin_ns
        if not self._is_spinning:
            self._is_spinning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A few looks; the loop does whatever else it has to do before the next."""
        self._mode = _SPIN
        found = self._counts[_SPIN]
        for _ in range(LOOKS_PER_TURN):
            if not self._poll():
                self._is_spinning = False
                return
            if self._counts[_SPIN] != found:
                break
        now_ns = time.perf_counter_ns()
        if self._spins_until_ns == 0:
            self._spins_until_ns = now_ns + self._spin_ns
        if now_ns < self._spins_until_ns:
            self._loop.call_soon(self._turn)
            return
        self._is_spinning = False
        self._park()

    def _park(self) -> None:
        if self._bell is None:
            self._bell = _make_bell(self._loop, self._woken)
        self._bell.arm(self._pollers)

    def _woken(self) -> None:
        if not self._is_spinning and not self._is_closed:
            self._look_once(_PARK)

    def _check(self) -> None:
        """The safety net: device errors, and host functions that were never called."""
        self._timer = None
        for poller in self._pollers:
            poller.check()
        if self._is_spinning or self._look_once(_TIMER):
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _look_once(self, mode: int) -> bool:
        """Of a parked loop: spin where there was progress, else sleep on. Whether a Point is still awaited."""
        self._mode = mode
        found = self._counts[mode]
        is_pending = self._poll()
        if is_pending and self._counts[mode] != found:
            self._spin()
        elif is_pending:
            self._park()
        return is_pending

    def _poll(self) -> bool:
        """Whether a Point is still awaited."""
        if self._pollers:
            self._pollers = [poller for poller in self._pollers if poller.poll()]
        return bool(self._pollers)


def _resolve(future: asyncio.Future[None], point: Point) -> None:
    if future.done():
        return
    try:
        point.is_reached()
    except BaseException as exc:  # noqa: BLE001  whatever ended the stream, the awaiter raises it
        future.set_exception(exc)
    else:
        future.set_result(None)


def _give_up(future: asyncio.Future[None], point: Point, deadline_seconds: float) -> None:
    if not future.done():
        future.set_exception(DeadlinePassed(f"stream {point.stream_name}: not reached within {deadline_seconds:g} s"))


class _Bell:
    """How a parked loop is woken."""

    def arm(self, pollers: list[Poller]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _TimerBell(_Bell):
    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = ring
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, pollers: list[Poller]) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PARKED_POLL_SECONDS, self._ring)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._wake()


_UV_ASYNC = 1  # of libuv's uv_handle_type
_UvCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# The memory of a handle for each Waker that ever parked. A host function may still be under way when its Waker, even its loop,
# is gone: to a closed handle libuv's uv_async_send does nothing, but it reads it. So it is never freed.
_handles: list[object] = []
_open_bells: set["_UvBell"] = set()  # libuv may call them until they are closed


class _UvBell(_Bell):
    """A ``uv_async_t`` on uvloop's libuv loop, whose extension exports libuv's functions; AttributeError where it does not."""

    def __init__(self, loop: uvloop.Loop, ring: Callable[[], None]) -> None:
        uv = ctypes.CDLL(uvloop.loop.__file__)
        uv.uv_handle_size.restype = ctypes.c_size_t
        uv.uv_async_init.argtypes = [ctypes.c_void_p] * 3
        uv.uv_close.argtypes = [ctypes.c_void_p] * 2
        uv.uv_unref.argtypes, uv.uv_unref.restype = [ctypes.c_void_p], None
        self._uv_close = uv.uv_close
        self._send = ctypes.cast(uv.uv_async_send, ctypes.c_void_p).value or 0
        self._loop = loop
        self._ring = ring
        self._callback = _UvCallback(self._called)
        memory = ctypes.create_string_buffer(uv.uv_handle_size(_UV_ASYNC))
        self._handle = ctypes.addressof(memory)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        uv_loop = pointer(getattr(uvloop.loop, "libuv_get_loop_t_ptr")(loop), None)  # noqa: B009  not in its type stubs
        if uv.uv_async_init(uv_loop, self._handle, self._callback):
            raise RuntimeError("uv_async_init failed")
        uv.uv_unref(self._handle)  # else a loop whose Waker was never closed could not end
        _handles.append(memory)
        _open_bells.add(self)

    def arm(self, pollers: list[Poller]) -> None:
        for poller in pollers:
            poller.arm(self._send, self._handle)

    def close(self) -> None:
        if self in _open_bells:
            _open_bells.remove(self)
            self._uv_close(self._handle, None)

    def _called(self, _handle: int) -> None:
        try:
            self._ring()
        except BaseException as exc:  # noqa: BLE001  nothing may be raised into libuv
            self._loop.call_exception_handler({"message": "a wake-up failed", "exception": exc})


def _make_bell(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> _Bell:
    if isinstance(loop, uvloop.Loop):
        try:
            return _UvBell(loop, ring)
        except AttributeError as exc:
            log.warning("uvloop %s hides libuv (%s): a parked loop looks every ms", uvloop.__version__, exc)
    return _TimerBell(loop, ring)
