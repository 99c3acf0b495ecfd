"""Fixtures that every room's tests share."""

import asyncio
import subprocess
from collections.abc import Callable

import pytest
import uvloop

from stages.model.source import ModelSource, conversion_command, locate_model

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
