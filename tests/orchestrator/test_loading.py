"""How loading is shown, and what a rank reports of it."""

import io
import logging
import threading

import msgspec
import pytest

from orchestrator.control import memory_channel_pair
from orchestrator.loading import BarProgress, LoggedProgress, create_progress, describe_loads
from orchestrator.pipeline import assemble
from orchestrator.rank_main import LoadReport
from stages.errors import StageFailed
from stages.plan import Loading, RankFailed
from tests.orchestrator.scripted_ranks import hello
from tests.served_engine import Sizes, pipeline_config, setup_for

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_for_all_ranks_on_a_terminal_until_all_have_loaded() -> None:
    stream, num_threads = Terminal(), threading.active_count()
    progress = create_progress(2, stream)
    assert stream.getvalue() == ""
    progress.update(Loading(0, 20 * MIB, 80 * MIB))
    progress.update(Loading(1, 5 * MIB, 20 * MIB))
    last = stream.getvalue().rpartition("\r")[2]
    assert "25%" in last
    assert "25.0M/100M" in last
    assert "rank 0 25%, rank 1 25%" in last
    progress.update(Loading(1, 20 * MIB, 20 * MIB))
    progress.update(Loading(0, 80 * MIB, 80 * MIB))
    assert stream.getvalue().endswith("\r")  # the line is empty again
    length = len(stream.getvalue())
    progress.close()
    assert len(stream.getvalue()) == length
    assert threading.active_count() == num_threads


def test_what_is_logged_meanwhile_goes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = [handler]
    try:
        progress = BarProgress(1, stream)
        progress.update(Loading(0, MIB, 2 * MIB))
        logging.getLogger("x").warning("something")
        lines = stream.getvalue().replace("\r", "\n").split("\n")
        progress.close()
        assert root.handlers == [handler]
    finally:
        root.handlers = handlers
    assert "something" in lines  # on a line of its own


def test_log_lines_elsewhere_when_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(create_progress(2, io.StringIO()), LoggedProgress)
    caplog.set_level(logging.INFO)
    progress = LoggedProgress(2, iter([0.0, 1.0, 4.9, 5.0, 6.0, 11.0]).__next__)
    for loaded in (10, 20, 30, 40, 100):
        progress.update(Loading(1, loaded * MIB, 100 * MIB))
    assert caplog.messages == [
        "loading weights: 30 of 100 MiB; rank 1 30%",
        "loading weights: 100 of 100 MiB; rank 1 100%",
    ]


async def test_a_rank_reports_at_first_now_and_then_and_at_the_end() -> None:
    ours, theirs = memory_channel_pair(("rank 3", "the engine"))
    report = LoadReport(3, theirs, iter([100.0, 100.05, 100.11, 100.12, 100.13]).__next__)
    for loaded in (1, 2, 3, 4, 9):
        report.tell(loaded, 9)
    await theirs.aclose()
    assert [await ours.receive() for _ in range(3)] == [Loading(3, 1, 9), Loading(3, 3, 9), Loading(3, 9, 9)]
    await ours.aclose()


async def test_reports_are_passed_on_and_are_no_answer() -> None:
    ours, theirs = memory_channel_pair(("rank 0", "the engine"))
    sizes = Sizes()
    seen: list[Loading] = []
    for message in (Loading(0, 1, 2), Loading(0, 2, 2), RankFailed(0, "enough", False)):
        theirs.send(message)
    with pytest.raises(StageFailed, match="enough"):
        await assemble({0: ours}, [setup_for(0, 1, sizes)], pipeline_config("auto", sizes), seen.append)
    assert seen == [Loading(0, 1, 2), Loading(0, 2, 2)]
    await theirs.aclose()
    await ours.aclose()


def test_the_end_is_told_for_each_rank() -> None:
    offers = [
        msgspec.structs.replace(hello(rank, 2, {}).offer, slice_bytes=size, load_seconds=seconds)
        for rank, (size, seconds) in enumerate([(365 * MIB, 0.5), (0, 0.0)])
    ]
    assert describe_loads(offers) == [
        "rank 0: 365 MiB of weights in 0.50 s, 0.77 GB/s",
        "rank 1: 0 MiB of weights in 0.00 s, 0.00 GB/s",
    ]
