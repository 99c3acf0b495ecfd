"""How much memory this process has used at most, from /proc."""

from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakGauge:
    """Growth of this process's peak resident memory since the gauge was made."""

    def __init__(self) -> None:
        with suppress(OSError):  # not allowed in some sandboxes; the peak so far then hides growth below it
            _CLEAR_REFS.write_text("5")  # proc(5): 5 resets the peak (VmHWM) to what is resident now
        self._before = _peak_bytes()

    def growth_bytes(self) -> int:
        return max(0, _peak_bytes() - self._before)


def _peak_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # not every kernel keeps it
