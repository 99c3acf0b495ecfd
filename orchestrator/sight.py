"""What can be seen of rank processes from outside, however stuck they are: by the kernel, and by their ledgers."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from metrics.reader import Doing, LedgerReader

SAMPLE_SECONDS = 0.5  # over which the use of the processor is told; the kernel counts it in hundredths of a second
SPINNING_SHARE = 0.1  # a busy machine leaves a spinning process little

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel, not to be disturbed", "T": "stopped", "t": "traced"}
_GONE = "gone"


class _Usage(NamedTuple):
    at_seconds: float
    cpu_seconds: float


class ProcessSight:
    """``orchestrator.engine.Sight`` of processes of this host.

    ``process_ids`` tells each rank's process now; ``ledgers[rank]`` is a descriptor of its ledger, which stays the caller's.
    """

    def __init__(self, process_ids: Callable[[], Mapping[int, int]], ledgers: Sequence[int]) -> None:
        self._process_ids = process_ids
        self._readers = [LedgerReader(os.dup(fd)) for fd in ledgers]
        self._usages: dict[int, tuple[_Usage, _Usage]] = {}  # by process: the last sample, and the one before

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def stopped(self) -> frozenset[int]:
        """The ranks whose processes are stopped by a signal or a debugger."""
        found: set[int] = set()
        for rank, process_id in self._process_ids().items():
            state, cpu_seconds = _look(process_id)
            self._sample(process_id, cpu_seconds)
            if state in ("T", "t"):
                found.add(rank)
        return frozenset(found)

    def describe(self) -> list[str]:
        """A line for each rank, as 'rank 1, process 4711: stopped; forward of step 12 for 2.1 s'."""
        now_ns = time.perf_counter_ns()
        lines: list[str] = []
        for rank, process_id in sorted(self._process_ids().items()):
            state, cpu_seconds = _look(process_id)
            self._sample(process_id, cpu_seconds)
            doing = [f"{it.kind} of step {it.step_id} for {(now_ns - it.since_ns) / 1e9:.1f} s" for it in self._doing(rank)]
            what = _STATES.get(state, _GONE)
            if state in ("R", "S"):
                what = self._usage(process_id, what)
            lines.append(f"rank {rank}, process {process_id}: {what}; last seen in {', '.join(doing) or 'no step'}")
        return lines

    def _doing(self, rank: int) -> list[Doing]:
        return self._readers[rank].doing() if rank < len(self._readers) else []

    def _sample(self, process_id: int, cpu_seconds: float) -> None:
        usage = _Usage(time.monotonic(), cpu_seconds)
        last, _ = self._usages.get(process_id, (usage, usage))
        if process_id not in self._usages or usage.at_seconds - last.at_seconds >= SAMPLE_SECONDS:
            self._usages[process_id] = (usage, last)
            for other in [other for other in self._usages if other not in self._process_ids().values()]:
                del self._usages[other]

    def _usage(self, process_id: int, state: str) -> str:
        """A process that spins, and one that waits for ever, told apart by the time of a processor that they use."""
        last, before = self._usages[process_id]
        passed = last.at_seconds - before.at_seconds
        if passed < SAMPLE_SECONDS:
            return state
        share = (last.cpu_seconds - before.cpu_seconds) / passed
        kind = "spinning or computing" if share >= SPINNING_SHARE else "waiting"
        return f"{kind} ({share:.0%} of a core)"


def _look(process_id: int) -> tuple[str, float]:
    """The state of a process as the kernel's letter, '' when it is gone, and the seconds of a processor it has used."""
    with suppress(OSError):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return "", 0.0
