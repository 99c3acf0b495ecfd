"""Brings back a pipeline after ranks were lost: new processes for them, new links for all.

The other ranks keep their process and their weights, and wait. Ranks that are lost meanwhile are replaced as well.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import NoReturn

from orchestrator.control import Channel, ChannelClosed, check_hello
from orchestrator.engine import DRAIN_SECONDS, Loss, Sight
from orchestrator.launch import Launcher
from orchestrator.pipeline import Pipeline, PipelineConfig, RanksMissing, end_epoch, link, receive_from
from stages.errors import ControlError, RankLost, StageFailed, StagewireError
from stages.plan import Hello, Offer, Setup

log = logging.getLogger(__name__)

WINDOW_SECONDS = 3600.0
FIRST_BACKOFF_SECONDS = 0.5  # before the second restart in a row that brought no token; the first is at once
LAST_BACKOFF_SECONDS = 30.0
EXIT_SECONDS = 1.0  # for the operating system to say how a lost process ended
CHECK_SECONDS = 0.25  # between looks for stopped processes


class Restarts:
    """How often processes were replaced, against how often they may be. Plain state: times are given."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._times: deque[float] = deque()  # of the last hour, at most max_restarts
        self._num_in_vain = 0

    def take(self, now: float, was_of_use: bool) -> float | None:
        """One more restart, at ``now``; ``was_of_use``: a request got a token after the last. Returns the seconds to wait
        before it, None when there must not be one."""
        while self._times and now - self._times[0] >= WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            return None
        self._times.append(now)
        self._num_in_vain = 0 if was_of_use else self._num_in_vain + 1
        if self._num_in_vain < 2:
            return 0.0
        return min(FIRST_BACKOFF_SECONDS * 2 ** min(self._num_in_vain - 2, 16), LAST_BACKOFF_SECONDS)


class Recovery:
    """``recover`` is what ``Engine.serve_ranks`` calls for each loss."""

    def __init__(
        self,
        launcher: Launcher,
        setups: Sequence[Setup],
        config: PipelineConfig,
        pipeline: Pipeline,
        max_restarts: int,
        step_timeout_seconds: float,
        sight: Sight,
    ) -> None:
        """``pipeline`` is the first, which was assembled from ``setups``."""
        self._launcher = launcher
        self._setups = setups
        self._config = config
        self._limits = pipeline.limits
        self._offers: list[Offer | None] = list(pipeline.offers)  # None: a new process that has not said its own
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._step_timeout_seconds = step_timeout_seconds
        self._sight = sight

    async def recover(self, loss: Loss) -> Pipeline:
        """The next pipeline. ``StagewireError`` when ranks were lost too often."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        lost, cause, was_of_use = loss.lost, loss.cause, loss.has_gained
        epochs = count(loss.epoch + 1)
        while True:
            await self._replace(lost, cause, was_of_use)
            await self._load()
            try:
                pipeline = await self._link(epochs)
            except StagewireError as exc:
                log.error("the next epoch cannot begin: %s", exc)
                lost, cause, was_of_use = await self._give_up(next(epochs), exc), exc, False
                continue
            log.info("epoch %d begins after %.1f s, transport %s", pipeline.epoch, loop.time() - began_at, pipeline.transport)
            return pipeline

    # ---- processes ------------------------------------------------------------------------------------------------

    async def _replace(self, lost: Collection[int], cause: StagewireError, was_of_use: bool) -> None:
        """New processes for the ranks ``lost``, and those that share theirs, told what to load."""
        loop = asyncio.get_running_loop()
        for group in sorted({self._launcher.group_of(rank) for rank in lost}):
            backoff_seconds = self._restarts.take(loop.time(), was_of_use)
            if backoff_seconds is None:
                await self._refuse(cause)
            if backoff_seconds:
                log.warning("rank %d: lost again, waiting %.1f s before its restart", group[0], backoff_seconds)
                await asyncio.sleep(backoff_seconds)
            if isinstance(cause, RankLost):
                await self._launcher.exit_of(group[0], EXIT_SECONDS)  # it is ending, and this way says how
            ended = await self._launcher.replace(group)
            log.warning("%s: its process is replaced", ended.cause)
            for rank in group:
                self._offers[rank] = None
                with suppress(ControlError):  # gone already: _load finds that out
                    self._launcher.channels[rank].send(self._setups[rank])

    async def _refuse(self, cause: StagewireError) -> NoReturn:
        if isinstance(cause, RankLost) and (ended := await self._launcher.exit_of(cause.rank, EXIT_SECONDS)) is not None:
            cause = StageFailed(cause.rank, ended.cause)
        if self._max_restarts == 0:
            raise cause
        log.error("ranks were restarted %d times within an hour, as often as --max-restarts allows", self._max_restarts)
        raise cause

    async def _load(self) -> None:
        """Wait until every new process has loaded; whichever rank is lost meanwhile is replaced, too."""
        waits: dict[int, asyncio.Task[Offer]] = {}
        stopping = asyncio.create_task(self._until_stopped(), name="stopped ranks")
        try:
            while None in self._offers:
                for rank in range(len(self._offers)):
                    if rank not in waits:
                        waits[rank] = asyncio.create_task(self._hear(rank), name=f"rank {rank} while others load")
                await asyncio.wait({*waits.values(), stopping}, return_when=asyncio.FIRST_COMPLETED)
                lost: dict[int, StagewireError] = {}
                if stopping.done():
                    lost |= {rank: StageFailed(rank, "its process is stopped") for rank in stopping.result()}
                    stopping = asyncio.create_task(self._until_stopped(), name="stopped ranks")
                for rank, wait in [(rank, wait) for rank, wait in waits.items() if wait.done()]:
                    del waits[rank]
                    try:
                        self._offers[rank] = wait.result()
                    except StagewireError as exc:
                        lost[rank] = exc
                for rank, cause in lost.items():
                    log.error("rank %d is lost while others load: %s", rank, cause)
                    for other in self._launcher.group_of(rank):
                        if (wait := waits.pop(other, None)) is not None:
                            await _cancelled(wait)
                if lost:
                    await self._replace(lost, lost[min(lost)], was_of_use=False)
        finally:
            await _cancelled(stopping, *waits.values())

    async def _hear(self, rank: int) -> Offer:
        """A new process's offer; of another, which has nothing to say now, only its end is heard."""
        channel = self._launcher.channels[rank]
        if self._offers[rank] is not None:
            while True:
                try:
                    await channel.receive()
                except ChannelClosed:
                    raise RankLost(rank) from None
        try:
            async with asyncio.timeout(self._config.start_timeout_seconds):
                hello = await receive_from(rank, channel, (Hello,))
        except TimeoutError:
            raise RanksMissing([rank], self._config.start_timeout_seconds) from None
        check_hello(hello, rank, len(self._setups))
        return hello.offer

    async def _until_stopped(self) -> frozenset[int]:
        """Ranks whose processes are stopped for --step-timeout. A stopped one says nothing, and everybody would wait."""
        since: dict[int, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, self._step_timeout_seconds / 4))
            stopped = self._sight.stopped()
            since = {rank: since.get(rank, loop.time()) for rank in stopped}
            overdue = [rank for rank, at in since.items() if loop.time() - at >= self._step_timeout_seconds]
            if overdue:
                return frozenset(overdue)

    # ---- links ----------------------------------------------------------------------------------------------------

    async def _link(self, epochs: Iterator[int]) -> Pipeline:
        offers = [offer for offer in self._offers if offer is not None]
        deadline = asyncio.get_running_loop().time() + self._config.start_timeout_seconds
        linking = asyncio.create_task(link(self._channels(), offers, self._limits, self._config, epochs, deadline), name="link")
        stopping = asyncio.create_task(self._until_stopped(), name="stopped ranks")
        try:
            await asyncio.wait({linking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not linking.done():
                raise StageFailed(min(stopping.result()), "its process is stopped")
            return linking.result()
        finally:
            await _cancelled(linking, stopping)

    async def _give_up(self, epoch: int, cause: StagewireError) -> frozenset[int]:
        """Have every rank let go of an epoch that did not begin; returns the ranks to replace."""
        lost = set(self._sight.stopped())
        if isinstance(cause, StageFailed):
            lost.add(cause.rank)
        elif isinstance(cause, RanksMissing):
            lost.update(cause.ranks)
        lost |= await end_epoch(self._channels(), epoch, str(cause), 2 * DRAIN_SECONDS, hopeless=lost)
        return frozenset(lost) or frozenset(range(len(self._offers)))  # no one's fault, then everybody's

    def _channels(self) -> list[Channel]:
        return [self._launcher.channels[rank] for rank in range(len(self._offers))]


async def _cancelled(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
