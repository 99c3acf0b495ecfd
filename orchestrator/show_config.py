"""How a resolved config is shown: as a table with where each value came from, or as a file that ``--config`` reads."""

import json
from collections.abc import Callable
from typing import Any, cast

from orchestrator.config import DEFAULT, OPTIONS, Resolved, redacted


def as_table(resolved: Resolved) -> str:
    """A line per option: its name, its value, and its source."""
    values = redacted(resolved.config)
    rows = [(option.flag, _shown(values[option.field]), resolved.sources[option.field]) for option in OPTIONS]
    widths = [max(len(row[column]) for row in [*rows, ("option", "value", "")]) for column in range(2)]
    lines = [("option", "value", "from"), *rows]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in lines)


def as_json(resolved: Resolved) -> str:
    """One object, with every option; values that are not set are null."""
    return json.dumps(_values(resolved), indent=1)


def as_yaml(resolved: Resolved) -> str:
    """The same as YAML, grouped as in ``--help``; the source of what is not a default stands behind it."""
    values = _values(resolved)
    lines: list[str] = []
    room = ""
    for option in OPTIONS:
        if option.room != room:
            room = option.room
            lines += ["", f"# {room}"] if lines else [f"# {room}"]
        # JSON is YAML too, and its quotes keep "null" or "1e3" a text.
        line = f"{option.field}: {json.dumps(values[option.field], ensure_ascii=False)}"
        source = resolved.sources[option.field]
        lines.append(line if source == DEFAULT else f"{line}  # {source}")
    return "\n".join(lines)


def _values(resolved: Resolved) -> dict[str, Any]:
    """A secret is null, since its stand-in would be read as one."""
    values = {option.field: None if option.is_secret else getattr(resolved.config, option.field) for option in OPTIONS}
    return {name: list(cast(tuple[int, ...], value)) if isinstance(value, tuple) else value for name, value in values.items()}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, cast(tuple[int, ...], value))) if isinstance(value, tuple) else str(value)


FORMATS: dict[str, Callable[[Resolved], str]] = {"table": as_table, "json": as_json, "yaml": as_yaml}
