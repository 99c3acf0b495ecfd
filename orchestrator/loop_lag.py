"""How late the loop calls what it was asked to call: what one piece of work on it costs all others."""

import asyncio
from time import perf_counter_ns

from metrics.ledger import Histogram

INTERVAL_SECONDS = 0.25


async def watch_loop_lag(lag: Histogram, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Observe it for as long as this runs."""
    interval_ns = round(interval_seconds * 1e9)
    while True:
        asked_at = perf_counter_ns()
        await asyncio.sleep(interval_seconds)
        lag.observe(max(perf_counter_ns() - asked_at - interval_ns, 0))
