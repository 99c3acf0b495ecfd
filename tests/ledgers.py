"""Ledgers for ranks and engines that tests run themselves."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from metrics.catalog import Place, Writer
from metrics.engine import EngineMetrics
from metrics.fold import Folder
from metrics.layout import OPERATIONS
from metrics.ledger import LedgerWriter, create_ledger
from metrics.reader import LedgerReader
from metrics.recorder import StepRecorder
from metrics.steps import Span


class RankLedgers:
    """The ledgers of all ranks of a pipeline: what writes each, and what reads it."""

    def __init__(self, num_ranks: int) -> None:
        fds = [create_ledger(Place(writer=Writer.RANK, rank=rank, world_size=num_ranks)) for rank in range(num_ranks)]
        self.readers = [LedgerReader(os.dup(fd)) for fd in fds]
        self.recorders: Sequence[StepRecorder] = [StepRecorder(LedgerWriter(fd)) for fd in fds]
        self._folders = [Folder(reader) for reader in self.readers]

    def fold(self) -> None:
        for folder in self._folders:
            assert folder.fold()

    def operations(self, rank: int) -> list[Span]:
        """The spans that are operations of a step."""
        return [span for span in self.readers[rank].spans() if span.kind in OPERATIONS]

    def close(self) -> None:
        for recorder in self.recorders:
            recorder.close()
        for folder in self._folders:
            folder.close()
        for reader in self.readers:
            reader.close()


@contextmanager
def rank_ledgers(num_ranks: int) -> Iterator[RankLedgers]:
    ledgers = RankLedgers(num_ranks)
    try:
        yield ledgers
    finally:
        ledgers.close()


class EngineLedger:
    """The engine's ledger: ``metrics`` writes it, ``value`` reads a series of it."""

    def __init__(self) -> None:
        fd = create_ledger(Place(writer=Writer.ENGINE, rank=-1, world_size=1))
        self._reader = LedgerReader(os.dup(fd))
        self.metrics = EngineMetrics(LedgerWriter(fd))

    def value(self, name: str, *labels: str) -> float:
        """Of a histogram, named with ``_count`` or ``_sum``, how many observations it has, or their sum."""
        histograms = self._reader.histograms()
        for suffix in ("_count", "_sum"):
            if (found := histograms.get(name.removesuffix(suffix))) is not None and name.endswith(suffix):
                counts, total = found[labels]
                return counts[-1] if suffix == "_count" else total
        return self._reader.samples()[name][labels]
