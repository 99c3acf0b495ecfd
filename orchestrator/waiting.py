"""Turns Points into awaitables."""

import asyncio
from collections import deque

from stages.device import Point


class Waker:
    """Wakes the coroutines of one loop when their Points are reached.

    Host streams settle a Point from their own thread. Those wake-ups are gathered, so that several Points that are
    reached together cost the loop one wake.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # One entry for each Point somebody awaits and that is reached: bounded by the tasks of the steps in flight.
        self._settled: deque[tuple[asyncio.Future[None], Point]] = deque()
        self._is_wake_scheduled = False
        self._is_closed = False

    async def reached(self, point: Point) -> None:
        """Return once ``point`` is reached; raises its stream's error.

        Cancelling this await changes nothing for the stream: the buffers stay owned by it until the Point is reached.
        """
        if point.is_reached():
            return
        future: asyncio.Future[None] = self._loop.create_future()
        point.add_done_callback(lambda: self._settle(future, point))
        await future

    def close(self) -> None:
        """Points reached from now on wake nobody; whoever still awaits one must be cancelled."""
        self._is_closed = True

    def _settle(self, future: asyncio.Future[None], point: Point) -> None:
        self._settled.append((future, point))
        # Cleared before the deque is drained: an entry added meanwhile schedules another wake, never none.
        if not self._is_wake_scheduled and not self._is_closed:
            self._is_wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_wake_scheduled = False
        while self._settled:
            future, point = self._settled.popleft()
            if future.done():
                continue
            try:
                point.is_reached()
            except BaseException as exc:  # noqa: BLE001  whatever ended the stream, the awaiter raises it
                future.set_exception(exc)
            else:
                future.set_result(None)
