"""A device's clock, on the host's.

The two run at nearly the same rate, from different zeros. The host sees each time of the device a little after it was, so the
least such lag is taken for none; what is left of error is how late the most prompt look was.
"""

from collections import deque

WINDOW_NS = 250_000_000  # lags are compared over this time
MAX_DRIFT = 1e-4  # of one clock against the other: a few parts in 10^5 were seen, and ntpd slews the host's
_NUM_PIECES = 16


class HostClock:
    """Places times of a device, nanoseconds from any zero, on the host's ``perf_counter_ns``.

    A later time of the device is never placed before an earlier one, whatever the order in which they are asked for: what was
    learned since holds only for later times. (Times older than the last sixteen corrections are not told apart so.)
    """

    def __init__(self) -> None:
        # Each piece is (since which device time, offset, no earlier than which host time); the newest first.
        self._pieces: deque[tuple[int, int, int]] = deque(maxlen=_NUM_PIECES)
        self._latest_ns = 0  # device time
        self._window_ns = 0  # device time of its start
        self._least_lag_ns = 0

    def place(self, device_ns: int, seen_ns: int) -> int:
        """The host's time at ``device_ns``, which the host saw at its own ``seen_ns``."""
        if not self._pieces:
            self._pieces.append((device_ns, seen_ns - device_ns, 0))
            self._latest_ns = device_ns
            self._begin_window(device_ns, seen_ns - device_ns)
        elif device_ns > self._latest_ns:
            self._learn(device_ns, seen_ns - device_ns)
            self._latest_ns = device_ns
        return self._placed(device_ns)

    def _learn(self, device_ns: int, lag_ns: int) -> None:
        offset = self._pieces[0][1]
        if lag_ns < offset:  # nothing is seen before it is
            self._correct(lag_ns)
            self._begin_window(device_ns, lag_ns)
            return
        if device_ns - self._latest_ns > WINDOW_NS:
            self._least_lag_ns = lag_ns  # older ones say nothing of now
        else:
            self._least_lag_ns = min(self._least_lag_ns, lag_ns)
        if (elapsed_ns := device_ns - self._window_ns) > WINDOW_NS:
            # By no more than the clocks may have drifted apart: that nobody looked in time is no drift.
            self._correct(min(self._least_lag_ns, offset + round(elapsed_ns * MAX_DRIFT)))
            self._begin_window(device_ns, lag_ns)

    def _begin_window(self, device_ns: int, lag_ns: int) -> None:
        self._window_ns = device_ns
        self._least_lag_ns = lag_ns

    def _correct(self, offset: int) -> None:
        """For times after all that were placed so far."""
        if offset != self._pieces[0][1]:
            self._pieces.appendleft((self._latest_ns, offset, self._placed(self._latest_ns)))

    def _placed(self, device_ns: int) -> int:
        for since_ns, offset, earliest_ns in self._pieces:
            if device_ns > since_ns:
                return max(device_ns + offset, earliest_ns)
        return device_ns + self._pieces[-1][1]
