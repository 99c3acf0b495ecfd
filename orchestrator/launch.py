"""Starts the processes of the ranks, watches them, and ends them; none outlives the engine.

``python -m orchestrator.launch PARENT COMMAND...`` runs COMMAND so that it dies with process PARENT.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.control import Channel, SocketChannel
from stages.errors import ConfigError, StagewireError

log = logging.getLogger(__name__)

KILL_SECONDS = 30.0  # for the kernel to end a process that holds much memory, on a busy machine
TERM_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL: a rank has nothing to save, only links to let go of
_MAX_REPORT_BYTES = 8 << 10  # of a child's standard error, kept for its last line
_PR_SET_PDEATHSIG = 1
_EXIT_USAGE = 2


@dataclass(frozen=True)
class ProcessExit:
    """A rank process ended. ``returncode`` is negative when signal ``-returncode`` killed it."""

    ranks: tuple[int, ...]
    returncode: int

    @property
    def cause(self) -> str:
        """As 'rank 1 was killed by SIGKILL'."""
        return f"{_name(self.ranks)} {describe_returncode(self.returncode)}"


class ChildProcess:
    """A child in a session of its own, so that a terminal's Ctrl-C reaches the engine alone, which then ends its children."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        on_exit: Callable[[int], None] | None = None,
        pass_fds: Sequence[int] = (),
        stderr: int | None = None,
    ) -> None:
        try:
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=pass_fds, start_new_session=True
            )
        except OSError as exc:
            raise StagewireError(f"cannot start {argv[0]}: {exc.strerror}") from exc
        try:
            # Readable once the process has ended: the same on every event loop, with neither a SIGCHLD handler nor a thread.
            self._pidfd = os.pidfd_open(self.popen.pid)
        except OSError as exc:
            self.popen.kill()
            self.popen.wait()
            raise StagewireError(f"cannot watch {argv[0]}: pidfd_open: {exc.strerror}") from exc
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)
        self.exited: asyncio.Future[int] = self._loop.create_future()

    @property
    def is_running(self) -> bool:
        """Whether it has not been reaped: until then its id belongs to it."""
        return self.popen.returncode is None

    def signal(self, signum: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self.popen.pid, signum)

    def kill(self) -> None:
        """End it now and reap it; works without a running loop, and twice."""
        if self.is_running:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        returncode = self.popen.wait()
        if not self._loop.is_closed() and not self.exited.done():
            self.exited.set_result(returncode)
        if self._on_exit is not None:
            self._on_exit(returncode)


class Launcher:
    """The rank processes of one host.

    Every rank has a socket pair of its own, inherited by descriptor number, so that nothing has a name that could be left
    behind; the engine's ends are ``channels``, by rank. ``on_exit`` is called for every process that ends,
    on the loop or by ``kill()``.
    Use it from the main thread: the kernel kills the children when the thread that started them ends.
    """

    def __init__(self, on_exit: Callable[[ProcessExit], None] | None = None) -> None:
        self.channels: dict[int, Channel] = {}
        self._on_exit = on_exit
        self._processes: dict[tuple[int, ...], ChildProcess] = {}
        self._starts: dict[tuple[int, ...], Callable[[], None]] = {}  # how to start the process of some ranks, again

    @property
    def process_ids(self) -> dict[int, int]:
        """Rank -> id of the process that serves it."""
        return {rank: process.popen.pid for ranks, process in self._processes.items() for rank in ranks}

    async def start(
        self,
        groups: Sequence[Sequence[int]],
        argv_for: Callable[[Sequence[int]], list[str]],
        env: Mapping[str, str],
        ledgers: Mapping[int, int] | None = None,
    ) -> None:
        """Start one process for each group of ranks: ``argv_for(group)`` followed by ``--parent PID`` and a
        ``--control RANK:FD`` for each of its ranks. ``env`` is their whole environment (``rank_environment``). ``ledgers``
        are descriptors, by rank, that are passed on by ``--ledger RANK:FD``.

        Standard output and error are inherited. On an error, a ``StagewireError``, or when cancelled, nothing is left.
        """
        try:
            for group in groups:
                ranks = tuple(group)
                self._starts[ranks] = partial(self._start_one, ranks, argv_for(group), env, ledgers or {})
                self._starts[ranks]()
                await asyncio.sleep(0)  # starting takes a few milliseconds: let the server answer in between
        except BaseException:
            self.kill()
            raise

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a process with ``rank``, itself included."""
        return next(ranks for ranks in self._processes if rank in ranks)

    async def replace(self, ranks: tuple[int, ...]) -> ProcessExit:
        """End the process of ``ranks`` if it has not ended, and start one like it; ``channels`` has new ones for them, the old
        ones are aborted. Returns how the old one ended. ``StagewireError`` when it does not end or cannot be started."""
        process = self._processes[ranks]
        for rank in ranks:
            self.channels[rank].abort()
        with contextlib.suppress(ProcessLookupError):
            process.signal(signal.SIGKILL)
        try:
            # Not before it is gone: until then the kernel has not taken its memory, nor its GPU's.
            async with asyncio.timeout(KILL_SECONDS):
                returncode = await asyncio.shield(process.exited)
        except TimeoutError:
            raise StagewireError(f"{_name(ranks)}: does not end {KILL_SECONDS:g} s after SIGKILL") from None
        self._starts[ranks]()
        return ProcessExit(ranks, returncode)

    async def exit_of(self, rank: int, timeout_seconds: float) -> ProcessExit | None:
        """How the process of ``rank`` ended; None when it still runs after ``timeout_seconds``."""
        ranks = self.group_of(rank)
        await asyncio.wait([self._processes[ranks].exited], timeout=timeout_seconds)
        returncode = self._processes[ranks].popen.returncode
        return None if returncode is None else ProcessExit(ranks, returncode)

    def _start_one(self, ranks: tuple[int, ...], argv: list[str], env: Mapping[str, str], ledgers: Mapping[int, int]) -> None:
        theirs: list[socket.socket] = []
        try:
            arguments = ["--parent", str(os.getpid())]
            for rank in ranks:
                ours, their = socket.socketpair()
                theirs.append(their)
                self.channels[rank] = SocketChannel(ours, peer=f"rank {rank}")
                arguments += ["--control", f"{rank}:{their.fileno()}"]
            passed = [ledgers[rank] for rank in ranks if rank in ledgers]
            for rank in ranks:
                if rank in ledgers:
                    arguments += ["--ledger", f"{rank}:{ledgers[rank]}"]
            self._processes[ranks] = ChildProcess(
                [*argv, *arguments],
                env,
                on_exit=lambda returncode: self._tell(ranks, returncode),
                pass_fds=[*(their.fileno() for their in theirs), *passed],
            )
        finally:
            for their in theirs:
                their.close()  # the rank's copy is then the last one: its end is our end of file

    def _tell(self, ranks: tuple[int, ...], returncode: int) -> None:
        if self._on_exit is not None:
            self._on_exit(ProcessExit(ranks, returncode))

    async def wait_failed(self) -> ProcessExit:
        """The first process that ended with an exit code other than 0; never returns when none does.

        A rank that ends with code 0 unasked shows as the end of its channel.
        """
        pending = {process.exited for process in self._processes.values()}
        while pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for ended in self._exits():
                if ended.returncode != 0:
                    return ended
        return await asyncio.get_running_loop().create_future()

    async def stop(self, timeout_seconds: float) -> list[ProcessExit]:
        """Wait for every process to end, as ``Drain`` told it to; SIGTERM those that have not after ``timeout_seconds``, then
        SIGKILL. All have been reaped, and the channels closed, when this returns; also when it is cancelled."""
        try:
            for patience_seconds, signum in ((timeout_seconds, signal.SIGTERM), (TERM_GRACE_SECONDS, signal.SIGKILL)):
                for ranks in await self._still_running(patience_seconds):
                    log.warning("%s: still running, sending %s", _name(ranks), signum.name)
                    self._processes[ranks].signal(signum)
            await self._still_running(None)
        finally:
            self.kill()
        return self._exits()

    def kill(self) -> None:
        """SIGKILL what runs, reap it and abort the channels. Waits only for the kernel to end the processes; may be
        called twice, also when the loop no longer runs."""
        for process in self._processes.values():
            process.signal(signal.SIGKILL)  # to all of them first: they end side by side
        for process in self._processes.values():
            process.kill()
        for channel in self.channels.values():
            channel.abort()

    def _exits(self) -> list[ProcessExit]:
        return [
            ProcessExit(ranks, process.popen.returncode) for ranks, process in self._processes.items() if not process.is_running
        ]

    async def _still_running(self, timeout_seconds: float | None) -> list[tuple[int, ...]]:
        """The ranks of the processes that still run after ``timeout_seconds``."""
        pending = [process.exited for process in self._processes.values() if process.is_running]
        if pending:
            await asyncio.wait(pending, timeout=timeout_seconds)
        return [ranks for ranks, process in self._processes.items() if process.is_running]


async def run_child(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a one-off program to its end, its standard error passed on as it comes.

    It dies with this process, and is killed when the call is cancelled. When it fails, its last line on standard error is
    the message: of a ``ConfigError`` when it exited with code 2 (usage), else of a ``StagewireError``.
    """
    wrapper = [sys.executable, "-m", "orchestrator.launch", str(os.getpid())]
    loop = asyncio.get_running_loop()
    process = ChildProcess([*wrapper, *argv], env, stderr=subprocess.PIPE)
    assert process.popen.stderr is not None
    tail = bytearray()
    with process.popen.stderr as pipe:
        fd = pipe.fileno()
        os.set_blocking(fd, False)

        def pass_on() -> bool:
            """Whether there may be more."""
            try:
                chunk = os.read(fd, 4096)
            except BlockingIOError:
                return False
            if not chunk:
                loop.remove_reader(fd)  # the exit comes by itself
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
            tail.extend(chunk)
            del tail[:-_MAX_REPORT_BYTES]
            return bool(chunk)

        loop.add_reader(fd, pass_on)
        try:
            returncode = await process.exited
            while pass_on():
                pass
        finally:
            process.kill()
            loop.remove_reader(fd)
    if returncode != 0:
        lines = [line.strip() for line in tail.decode(errors="replace").split("\n")]
        message = next((line for line in reversed(lines) if line), "")
        if returncode < 0 or not message:
            message = f"{argv[0]} {describe_returncode(returncode)}"
        raise (ConfigError if returncode == _EXIT_USAGE else StagewireError)(message)


def rank_environment(base: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The environment of a rank that computes with ``num_threads`` threads and fetches nothing from the network."""
    return {
        **base,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        # A module that is loaded while a stream waits for a peer can stop the rank, and so can streams that share a queue.
        "CUDA_MODULE_LOADING": base.get("CUDA_MODULE_LOADING", "EAGER"),
        "CUDA_DEVICE_MAX_CONNECTIONS": base.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    }


def open_control(argument: str) -> tuple[int, socket.socket]:
    """The rank and its socket that a ``--control RANK:FD`` argument names; the caller owns the socket."""
    rank, colon, fd = argument.partition(":")
    if not (colon and rank.isdecimal() and fd.isdecimal()):
        raise ConfigError(f"--control {argument}: must be RANK:FD, two numbers")
    try:
        sock = socket.socket(fileno=int(fd))
    except OSError as exc:
        raise ConfigError(f"--control {argument}: descriptor {fd} is not an open socket ({exc.strerror})") from exc
    sock.set_inheritable(False)
    return int(rank), sock


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Ends at once when that has happened already.

    Called by the child, first thing; it holds across an exec, not for the child's own children.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"the process of ranks {', '.join(map(str, ranks))}"


def describe_returncode(returncode: int) -> str:
    """As 'exited with code 1' or 'was killed by SIGKILL'."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
