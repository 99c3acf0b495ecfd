"""Keeps the exporter of the metrics running: ``python -m metrics``, a process that only reads what ranks and engine wrote.

It dies with this process. When it ends it is started again, and nobody else is told: the ranks do not know of it.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

from orchestrator.launch import ChildProcess, describe_returncode
from stages.errors import StagewireError

log = logging.getLogger(__name__)

RESTART_SECONDS = 0.2  # after the first end; each end soon after a start doubles it
MAX_RESTART_SECONDS = 30.0
LONG_LIFE_SECONDS = 60.0


class ExporterProcess:
    """The exporter of one worker. ``ledgers`` are descriptors that stay open, and the caller's.

    ``sock`` listens, and is the caller's too: while the exporter is started again, connections wait in it.
    """

    def __init__(self, sock: socket.socket, ledgers: Sequence[int]) -> None:
        self._sock = sock
        self._ledgers = ledgers
        self._process: ChildProcess | None = None

    async def keep_running(self) -> None:
        """Never returns. Ends the exporter when cancelled."""
        delay_seconds = RESTART_SECONDS
        try:
            while True:
                started_at = time.monotonic()
                try:
                    end = describe_returncode(await self._start().exited)
                except StagewireError as exc:  # the operating system is out of something: requests are answered without it
                    end = str(exc)
                if time.monotonic() - started_at > LONG_LIFE_SECONDS:
                    delay_seconds = RESTART_SECONDS
                log.warning("the metrics exporter %s; starting it again in %g s", end, delay_seconds)
                await asyncio.sleep(delay_seconds)
                delay_seconds = min(2 * delay_seconds, MAX_RESTART_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now and reap it; it has nothing to lose. May be called twice."""
        if self._process is not None:
            self._process.kill()

    def _start(self) -> ChildProcess:
        argv = [sys.executable, "-m", "orchestrator.launch", str(os.getpid()), sys.executable, "-m", "metrics"]
        argv += ["--listen-fd", str(self._sock.fileno())]
        for fd in self._ledgers:
            argv += ["--ledger", str(fd)]
        self._process = ChildProcess(argv, None, pass_fds=[self._sock.fileno(), *self._ledgers])
        return self._process
