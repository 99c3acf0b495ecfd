"""What every benchmark says of where it ran, and how it shows what it saw."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.driver import Driver

Row = Mapping[str, Any]


def environment() -> dict[str, str]:
    """Machine, versions and commit of this run."""
    driver = Driver()
    version = driver.version()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE, text=True, check=False)
    import torch  # here: most of a benchmark needs none of it

    return {
        "machine": f"{driver.device_count()} x {driver.device_name(0)}, {platform.processor() or platform.machine()}",
        "cuda": f"driver {version // 1000}.{version % 1000 // 10}",
        "torch": torch.__version__,
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


def save(path: Path | None, name: str, rows: Sequence[Row]) -> None:
    """Add a table to a JSON file, with the environment beside it."""
    if path is None:
        return
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"environment": environment()}
    found[name] = list(rows)
    path.write_text(json.dumps(found, indent=1))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
