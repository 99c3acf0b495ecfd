"""Shows how far the ranks are with loading their weights: a bar on a terminal, log lines anywhere else."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TextIO

from stages.plan import Loading, Offer

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0  # between two log lines: a model that loads within that needs none
_MIB = 2**20


class LoadProgress(ABC):
    """Told by ``update`` what ranks report. It closes itself once all have read everything; ``close`` does it before, when
    loading ends otherwise, and may be called twice."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loaded: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def update(self, message: Loading) -> None:
        self._loaded[message.rank] = message.loaded_bytes
        self._total[message.rank] = message.total_bytes
        self._show(sum(self._loaded.values()), sum(self._total.values()))
        if len(self._total) == self._num_ranks and self._loaded == self._total:
            self.close()

    @abstractmethod
    def _show(self, loaded_bytes: int, total_bytes: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def _by_rank(self) -> str:
        """As 'rank 0 100 %, rank 1 40 %'."""
        shares = ((rank, self._loaded[rank] / max(1, self._total[rank])) for rank in sorted(self._total))
        return ", ".join(f"rank {rank} {share:.0%}" for rank, share in shares)


class LoggedProgress(LoadProgress):
    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_ranks)
        self._clock = clock
        self._logged_at = clock()

    def _show(self, loaded_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if now - self._logged_at >= LINE_SECONDS:
            self._logged_at = now
            log.info("loading weights: %d of %d MiB; %s", loaded_bytes // _MIB, total_bytes // _MIB, self._by_rank())

    def close(self) -> None:
        pass


class BarProgress(LoadProgress):
    """One bar for all ranks; it appears with the first report and is gone when loading is over. What this process logs
    meanwhile is written above it."""

    def __init__(self, num_ranks: int, stream: TextIO) -> None:
        super().__init__(num_ranks)
        from tqdm import tqdm  # here: most workers have no terminal
        from tqdm.contrib.logging import logging_redirect_tqdm

        # Its own lock is for several processes, and may start one.
        tqdm.set_lock(threading.RLock())  # pyright: ignore[reportUnknownMemberType]
        tqdm.monitor_interval = 0  # nor does it need a thread
        self._new_bar = lambda: tqdm(
            desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, file=stream, leave=False, dynamic_ncols=True,
        )  # fmt: skip
        self._bar = None
        self._redirected = ExitStack()
        self._redirected.enter_context(logging_redirect_tqdm())

    def _show(self, loaded_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = self._new_bar()
        self._bar.total, self._bar.n = total_bytes, loaded_bytes
        self._bar.set_postfix_str(self._by_rank())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._redirected.close()


def create_progress(num_ranks: int, stream: TextIO) -> LoadProgress:
    return BarProgress(num_ranks, stream) if stream.isatty() else LoggedProgress(num_ranks)


def describe_loads(offers: Sequence[Offer]) -> list[str]:
    """A line per rank: what it loaded, how long that took, and how fast that is."""
    return [
        f"rank {rank}: {offer.slice_bytes / _MIB:.0f} MiB of weights in {offer.load_seconds:.2f} s, "
        f"{offer.slice_bytes / max(offer.load_seconds, 1e-9) / 1e9:.2f} GB/s"
        for rank, offer in enumerate(offers)
    ]
