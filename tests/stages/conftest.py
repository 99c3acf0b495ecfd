"""Fixtures of the tests that compute with a model."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.stages.chain import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    return cache(lambda family: make_tiny(tmp_path_factory.mktemp(family) / "model", family))
