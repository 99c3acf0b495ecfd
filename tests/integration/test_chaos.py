"""A short run of what `make chaos` does at length."""

import json
import subprocess
import sys

import pytest

from stages.model.source import ModelSource

pytestmark = pytest.mark.alone


def test_nothing_is_lost_with_a_rank(smollm2: ModelSource) -> None:
    short = [
        "--seed",
        "1",
        "--small",
        "--losses",
        "1",
        "--streams",
        "6",
        "--tokens",
        "20",
        "--long-prompt",
        "200",
        "--pause",
        "0.3",
    ]
    done = subprocess.run([sys.executable, "-m", "tests.chaos", *short], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["losses"], report["failed"], report["wrong"], report["exit_code"]) == (1, 0, 0, 0)
    assert report["requests"] >= 6
