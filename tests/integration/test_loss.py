"""Ranks in processes that are lost while they serve: who is told what, and how soon."""

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.stages.transport.harness import no_leaks  # noqa: F401  every test here checks for leaks

pytestmark = pytest.mark.alone
TRANSPORTS = ["shared_memory", "gloo", "copy_engine"]  # the copy engine of emulated GPUs
KILLED = -signal.SIGKILL


def lose(transport: str, signum: signal.Signals, step_timeout: float, num_rounds: int) -> list[dict[str, Any]]:
    arguments = map(str, (transport, signum.name, step_timeout, num_rounds))
    done = subprocess.run([sys.executable, "-m", "tests.toy_loss", *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == num_rounds
    for found in rounds:
        codes = [0, 0]
        codes[found["victim"]] = KILLED
        assert found["exit_codes"] == codes, "the other rank lives on, and drains when it is told to"
        assert len(found["told"]) == 4
    return rounds


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_waits_for_a_killed_rank_raises_at_once(transport: str) -> None:
    """At ten times of a step. Most of the time is the kernel's, which frees a process's memory before it closes its sockets."""
    seconds: list[float] = []
    for found in lose(transport, signal.SIGKILL, 10, 10):
        cause = f"stage {found['victim']} failed: its process ended"
        assert {text for text, _ in found["told"]} == {cause}
        assert found["awaits"], "its peer waited for it"
        assert all(text.startswith(f"epoch 0 ended: {cause}") for _, text, _ in found["awaits"])
        seconds.append(max(seconds for *_, seconds in found["awaits"]))
    print(f"from the kill to the last await's error: {', '.join(f'{each * 1e3:.0f} ms' for each in seconds)}")  # noqa: T201
    assert sorted(seconds)[len(seconds) // 2] < 0.25
    assert max(seconds) < 2.0, "on a busy machine"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_lost_after_the_step_timeout_and_named(transport: str) -> None:
    for found in lose(transport, signal.SIGSTOP, 1, 2):
        cause = r"no progress on step \d+ for 1 s \(--step-timeout\)"
        for text, seconds in found["told"]:
            assert re.fullmatch(f"stage {found['victim']} failed: {cause}", text)
            assert 0.9 < seconds < 4
        assert found["awaits"], "its peer waited for it"
        for _, text, seconds in found["awaits"]:
            assert re.match(f"epoch 0 ended: {cause}", text)
            assert 0.9 < seconds < 3
