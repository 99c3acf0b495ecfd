"""Fixtures of the tests of docker/: its files, and the tools that judge them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
UNPACKED = ROOT / "build/prometheus/usr/bin"  # where `make prometheus` puts what PATH lacks


def find_program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.fail(f"{name} is neither in PATH nor in {UNPACKED}: run `make prometheus`, or install Prometheus's release")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return find_program("promtool")


@pytest.fixture(scope="session")
def prometheus_program() -> str:
    return find_program("prometheus")


@pytest.fixture(scope="session")
def hadolint() -> str:
    return str(Path(sys.executable).with_name("hadolint"))


class _ComposeLoader(yaml.SafeLoader):
    """YAML with Compose's ``!reset``, which takes away what the file below says."""


_ComposeLoader.add_constructor("!reset", lambda loader, node: None)


def load_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), _ComposeLoader)
