"""Pipelines on GPUs: the tokens of two stages are those of one, whichever way the stages reach each other.

The CPU twins are ``test_parity.py``, and ``test_copy_engine.py`` for the transport.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.tokenizer import Tokenizer
from stages.driver import Driver
from stages.model.source import ModelSource
from tests.integration.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS: list[str] = json.loads((Path(__file__).parent.parent / "prompts.json").read_text())
NUM_TOKENS = 16


def serve(model: Path, devices: str, transport: str, *options: str) -> Worker:
    num_ranks = devices.count(",") + 1
    arguments = ["--model", str(model), "-pp", str(num_ranks), "--device", devices, "--pp-transport", transport]
    limits = ["--dtype", "float32", "--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--max-model-len", "512"]
    return Worker(*arguments, *limits, *options)


def answers(worker: Worker, prompts: list[list[int]], num_concurrent: int) -> list[str]:
    def one(prompt: list[int]) -> str:
        found = worker.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        return found["choices"][0]["text"]

    with ThreadPoolExecutor(num_concurrent) as pool:
        return list(pool.map(one, prompts))


@pytest.fixture(scope="module")
def reference(smollm2: ModelSource) -> Iterator[tuple[list[list[int]], list[str]]]:
    """The prompts, and what one stage answers, one request at a time."""
    prompts = [Tokenizer.from_directory(smollm2.path).encode(text) for text in PROMPTS]
    worker = serve(smollm2.path, "cuda:0", "auto")
    try:
        yield prompts, answers(worker.wait_ready(), prompts, 1)
        assert worker.stop() == 0
    finally:
        worker.kill()


def layouts() -> list[tuple[str, str]]:
    """Devices and transports for two ranks here."""
    try:
        num_gpus = Driver().device_count()
    except Exception:  # noqa: BLE001  collecting these tests needs no GPU
        num_gpus = 0
    return [("cuda:0,cuda:0", "copy_engine"), *([("cuda:0,cuda:1", "copy_engine")] if num_gpus > 1 else [])]


@pytest.mark.parametrize(("devices", "transport"), layouts())
@pytest.mark.parametrize("num_concurrent", [1, 16])
def test_two_stages_give_the_tokens_of_one(
    smollm2: ModelSource,
    reference: tuple[list[list[int]], list[str]],
    devices: str,
    transport: str,
    num_concurrent: int,
) -> None:
    prompts, expected = reference
    worker = serve(smollm2.path, devices, transport)
    try:
        assert answers(worker.wait_ready(), prompts, num_concurrent) == expected
        assert worker.stop() == 0
        worker.check_nothing_is_left()
    finally:
        worker.kill()


def test_a_killed_rank_ends_the_worker_and_leaves_nothing(smollm2: ModelSource) -> None:
    worker = serve(smollm2.path, "cuda:0,cuda:0", "copy_engine")
    try:
        worker.wait_ready()
        rng = random.Random(0)
        events = worker.stream([rng.randrange(60) for _ in range(8)], max_tokens=400)
        next(events)
        worker.rank_processes()[1].kill()
        assert list(events)[-1] == "[DONE]"
        assert worker.wait() == 1
        worker.check_nothing_is_left()
    finally:
        worker.kill()
