"""The composition root: builds a Stage and hands it to a RankWorker. The one place where torch and asyncio meet.

``python -m orchestrator.rank_main --parent PID --control RANK:FD [--control RANK:FD ...]``: one process serves one rank, or
all of them under the ``memory`` transport. What to load arrives on the control channel.
"""

import argparse
import asyncio
import gc
import logging
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

import uvloop

from metrics.ledger import LedgerError, LedgerWriter
from metrics.recorder import StepRecorder
from orchestrator import __version__
from orchestrator.control import Channel, ChannelClosed, SocketChannel
from orchestrator.launch import die_with_parent, open_control
from orchestrator.rank import RankWorker
from stages.assembly import RankAssembly, load_rank
from stages.errors import ConfigError, ControlError, StagewireError, one_line
from stages.plan import PROTOCOL_VERSION, Hello, Loading, Offer, RankFailed, Setup
from stages.transport.memory import MemoryHub

log = logging.getLogger(__name__)

DRAINED = 0
FAILED = 1
USAGE = 2
REPORT_SECONDS = 0.1  # as often as a progress bar is worth drawing

LoadRank = Callable[[Setup, MemoryHub | None, Callable[[int, int], None]], tuple[RankAssembly, Offer]]
"""Loads what a Setup says. The hub is shared by the ranks of a process, None when it serves one; the last is told how many
bytes of how many are read."""


def main(argv: Sequence[str] | None = None, load: LoadRank = load_rank) -> int:
    """Serve the ranks that the arguments name until the engine drains them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stagewire rank", description="Serve one stage of a pipeline.", allow_abbrev=False)
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process ends")
    parser.add_argument("--control", action="append", required=True, metavar="RANK:FD", help="a connected control socket")
    parser.add_argument("--ledger", action="append", default=[], metavar="RANK:FD", help="an inherited ledger to write")
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    try:
        recorders = dict(open_ledger(argument) for argument in args.ledger)
    except ConfigError as exc:
        parser.error(str(exc))
    return uvloop.run(serve_ranks(dict(sorted(open_control(argument) for argument in args.control)), load, recorders))


def open_ledger(argument: str) -> tuple[int, StepRecorder]:
    """The rank and the recorder of its ledger that a ``--ledger RANK:FD`` argument names; ``ConfigError`` when it is none."""
    rank, colon, fd = argument.partition(":")
    if not (colon and rank.isdecimal() and fd.isdecimal()):
        raise ConfigError(f"--ledger {argument}: must be RANK:FD, two numbers")
    try:
        writer = LedgerWriter(int(fd))
    except (OSError, LedgerError) as exc:
        raise ConfigError(f"--ledger {argument}: {exc}") from exc
    if writer.place.rank != int(rank):
        raise ConfigError(f"--ledger {argument}: is the ledger of {writer.place.writer} {writer.place.rank}")
    return int(rank), StepRecorder(writer)


async def serve_ranks(
    sockets: dict[int, socket.socket], load: LoadRank, recorders: Mapping[int, StepRecorder] | None = None
) -> int:
    """``recorders`` are by rank; a rank without one records nothing."""
    hub = MemoryHub() if len(sockets) > 1 else None
    channels = {rank: SocketChannel(sock, peer="the engine") for rank, sock in sockets.items()}
    try:
        async with asyncio.TaskGroup() as tasks:
            for rank, channel in channels.items():
                recorder = (recorders or {}).get(rank)
                tasks.create_task(serve_rank(rank, channel, hub, load, recorder), name=f"rank {rank}")
    except BaseExceptionGroup as group:
        return await _report(channels, group.exceptions[0])
    for channel in channels.values():
        await channel.aclose()
    return DRAINED


async def serve_rank(rank: int, channel: Channel, hub: MemoryHub | None, load: LoadRank, recorder: StepRecorder | None) -> None:
    """One rank's life: its Setup, its slice of the model, its Hello, then plans."""
    setup = await channel.receive()
    if not isinstance(setup, Setup) or setup.rank != rank:
        raise ControlError(f"rank {rank}: the engine's first message is {setup}, must be this rank's Setup")
    assembly, offer = load(setup, hub, LoadReport(rank, channel).tell)
    # What importing and loading made lives as long as the process: a full collection would walk all of it, for 0.3 s.
    gc.collect()
    gc.freeze()
    if recorder is not None:
        recorder.describe(
            {"version": __version__, "python": platform.python_version(), "torch": version("torch")},
            layers=f"{offer.first_layer}-{offer.end_layer - 1}",
            device=setup.device if setup.device == offer.device else f"{setup.device} ({offer.device})",
            host=socket.gethostname(),
        )
    channel.send(Hello(PROTOCOL_VERSION, __version__, rank, setup.world_size, offer))
    await RankWorker(rank, channel, assembly.open, recorder, setup.spin_us).run()


class LoadReport:
    """Tells the engine how far loading is: the first time, at the end, and at most every ``REPORT_SECONDS`` between."""

    def __init__(self, rank: int, channel: Channel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rank = rank
        self._channel = channel
        self._clock = clock
        self._told_at = 0.0

    def tell(self, loaded_bytes: int, total_bytes: int) -> None:
        """From the loop's thread, which loads."""
        now = self._clock()
        if now - self._told_at >= REPORT_SECONDS or loaded_bytes == total_bytes:
            self._told_at = now
            self._channel.send(Loading(self._rank, loaded_bytes, total_bytes))


async def _report(channels: dict[int, SocketChannel], cause: BaseException) -> int:
    """Tell the engine why this process ends."""
    if isinstance(cause, ChannelClosed):
        log.debug("the engine is gone")
        return FAILED
    if not isinstance(cause, StagewireError):
        log.critical("unexpected error", exc_info=cause)
    for rank, channel in channels.items():
        try:
            channel.send(RankFailed(rank, one_line(cause), isinstance(cause, ConfigError)))
            await channel.aclose()
        except ControlError:
            log.debug("the engine is gone")
    return USAGE if isinstance(cause, ConfigError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
