"""What the kernel says of a process: read from /proc, which answers also for one that is stopped or hangs."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STOPPED = "tT"  # by a signal, by a debugger


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    is_stopped: bool
    cpu_seconds: float
    resident_bytes: int
    num_open_fds: int | None  # None when it is another user's


def process_status(process_id: int) -> ProcessStatus | None:
    """None when there is none, or only a zombie."""
    with suppress(OSError):
        # The name of a program may hold anything, a closing bracket, too.
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return ProcessStatus(
                is_stopped=fields[0] in _STOPPED,
                cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
                resident_bytes=int(fields[21]) * _PAGE_BYTES,
                num_open_fds=_num_open_fds(process_id),
            )
    return None


def _num_open_fds(process_id: int) -> int | None:
    try:
        return len(os.listdir(f"/proc/{process_id}/fd"))
    except OSError:
        return None
