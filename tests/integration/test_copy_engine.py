"""Whole pipelines over the copy engine, each rank a process with an emulated GPU."""

import json
import subprocess
import sys

import pytest

from tests.toy_model import toy_tokens


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_token_is_right_and_every_rank_ends(num_stages: int) -> None:
    num_requests, num_tokens = 12, 24
    arguments = map(str, (num_stages, 0, num_requests, num_tokens, "copy_engine"))
    done = subprocess.run([sys.executable, "-m", "tests.toy_worker", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["tokens"] == [toy_tokens([i], num_tokens, num_stages) for i in range(num_requests)]
    assert run["exit_codes"] == [0] * num_stages
