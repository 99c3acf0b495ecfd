"""The two ranks of a benchmark: a process and a GPU each, or one process with both where there is one GPU."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Exchange = Callable[[Any], list[Any]]
"""Gives what both ranks gave, in their order."""


def run_pair(worker: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300) -> list[Any]:
    """``worker(rank, exchange, *arguments)`` in two processes; what each returned. The first failure ends both."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    processes = [context.Process(target=_run, args=(worker, rank, theirs[rank], arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for connection in theirs:
        connection.close()
    results: dict[int, Any] = {}
    try:
        while len(results) < 2:
            messages = [_receive(ours[rank], timeout_seconds) for rank in range(2) if rank not in results]
            if all(kind == "exchange" for kind, _ in messages) and len(messages) == 2:
                for connection in ours:
                    connection.send([data for _, data in messages])
                continue
            for rank, (kind, data) in zip([r for r in range(2) if r not in results], messages, strict=True):
                if kind != "result":
                    raise RuntimeError(f"rank {rank}: {data}")
                results[rank] = data
        return [results[rank] for rank in range(2)]
    finally:
        for process in processes:
            process.join(10 if len(results) == 2 else 1)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(connection: Connection, timeout_seconds: float) -> tuple[str, Any]:
    if not connection.poll(timeout_seconds):
        raise RuntimeError(f"a rank said nothing for {timeout_seconds:g} s")
    return connection.recv()


def _run(worker: Callable[..., Any], rank: int, connection: Connection, arguments: tuple[Any, ...]) -> None:
    def exchange(data: Any) -> list[Any]:
        connection.send(("exchange", data))
        return connection.recv()

    try:
        connection.send(("result", worker(rank, exchange, *arguments)))
    except BaseException:  # noqa: BLE001  the process's edge: the parent raises it
        connection.send(("error", traceback.format_exc()))
