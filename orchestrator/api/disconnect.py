"""Ending work whose client has gone."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Run ``work`` to its end, or cancel it when the client goes away; is it done?

    To be called after the body was read. ``work`` handles its own exceptions: one that escapes ends this call as an
    ``ExceptionGroup``.
    """
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(work, name="answer a request")
        watcher = group.create_task(_cancel_on_disconnect(receive, worker), name="watch for a disconnect")
        worker.add_done_callback(lambda _: watcher.cancel())
    return not worker.cancelled()


async def _cancel_on_disconnect(receive: Receive, worker: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    worker.cancel()
