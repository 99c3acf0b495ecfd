"""What every benchmark says of where it ran, and how it shows what it saw."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.machine import read_machine
from stages.driver import Driver

Row = Mapping[str, Any]


def environment() -> dict[str, str]:
    """Machine, versions and commit of this run."""
    driver = Driver()
    version = driver.version()
    return {
        "machine": f"{driver.device_count()} x {driver.device_name(0)}, {platform.processor() or platform.machine()}",
        "cuda": f"driver {version // 1000}.{version % 1000 // 10}",
        **_versions(),
    }


def cpu_environment() -> dict[str, str]:
    """The same of a run without a GPU, with the load of the machine, which makes times worse."""
    machine = read_machine()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in cpu_flags()]
    return {
        "machine": f"{machine.num_usable_cpus} CPUs of {machine.cpu_model} ({', '.join(features) or 'no AVX2'})",
        "load": f"{os.getloadavg()[0]:.1f}",
        **_versions(),
    }


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def _versions() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE, text=True, check=False)
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }


def percentile(samples: Sequence[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * share))]


def show(title: str, rows: Sequence[Row]) -> None:
    """A Markdown table; its columns are the keys of the first row."""
    columns = list(rows[0])
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_shown(row.get(column, "")) for column in columns) + " |")


def save(path: Path | None, name: str, rows: Sequence[Row], describe: Callable[[], dict[str, str]] = environment) -> None:
    """Add a table to a JSON file, with the environment that ``describe`` gives beside it."""
    if path is None:
        return
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"environment": describe()}
    found[name] = list(rows)
    path.write_text(json.dumps(found, indent=1))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
