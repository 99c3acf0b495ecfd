"""A short run of what `make chaos` does at length."""

import json
import subprocess
import sys

import pytest

from stages.model.source import ModelSource

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("arguments", [["-pp", "3", "--seed", "1"]])
def test_nothing_is_lost_with_a_rank(smollm2: ModelSource, arguments: list[str]) -> None:
    short = ["--small", "--losses", "1", "--streams", "8", "--tokens", "30", "--long-prompt", "200", "--pause", "0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *short, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["losses"], report["failed"], report["wrong"], report["exit_code"]) == (1, 0, 0, 0)
    assert report["requests"] >= 8
