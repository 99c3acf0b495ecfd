import asyncio
import time

from orchestrator.loop_lag import watch_loop_lag
from tests.ledgers import EngineLedger


async def test_work_that_holds_the_loop_up_is_seen_as_lag() -> None:
    ledger = EngineLedger()
    watching = asyncio.create_task(watch_loop_lag(ledger.metrics.loop_lag, interval_seconds=0.02))
    await asyncio.sleep(0.1)
    quiet = ledger.value("event_loop_lag_seconds_sum")
    time.sleep(0.1)  # noqa: ASYNC251  what is measured
    await asyncio.sleep(0.05)
    watching.cancel()
    assert ledger.value("event_loop_lag_seconds_count") >= 4
    assert ledger.value("event_loop_lag_seconds_sum") - quiet > 0.05
