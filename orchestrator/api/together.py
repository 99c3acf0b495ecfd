"""Several pieces of work at once, which end together."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first that fails ends the others, and its exception is raised as it is.

    Each has run until it first waits before any of them goes on.
    """
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work, name=f"choice {i}") for i, work in enumerate(works)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
