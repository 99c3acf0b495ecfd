"""Fixtures that every room's tests share."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator

import pytest
import uvloop

from stages.cuda import CudaDevice
from stages.model.source import ModelSource, conversion_command, locate_model
from tests.gpu import GPUS, Gate, gpu_device

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories(item: pytest.Function) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A module's ``LOOPS`` names the event loops its tests run on; asyncio's own when there is none."""
    return {name: LOOP_FACTORIES[name] for name in getattr(item.module, "LOOPS", ("asyncio",))}


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """SmolLM2-135M-Instruct, converted once into the cache that ``stagewire serve`` uses too."""
    source = locate_model(None, "auto")
    if not source.is_converted:
        done = subprocess.run(conversion_command(source), stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr
    return source


@pytest.fixture(params=GPUS)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """An emulated GPU, and a real one for tests that are run with ``-m gpu``."""
    with gpu_device(request.param) as made:
        yield made


@pytest.fixture
def emulated() -> Iterator[CudaDevice]:
    with gpu_device("emulated") as made:
        yield made


@pytest.fixture
def gate(device: CudaDevice) -> Iterator[Gate]:
    made = Gate(device)
    yield made
    made.close()
