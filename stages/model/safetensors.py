"""The safetensors files of a model directory: what is in them, and whether they are whole. No torch.

The format is a little-endian 64-bit header size, the JSON header with each tensor's dtype, shape and offsets, and the data.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stages.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``dtype`` is the format's own name (as 'BF16'), ``start`` the file offset of its first byte."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def list_tensors(directory: Path) -> list[StoredTensor]:
    """Every tensor of the model in ``directory``; ``ConfigError`` when weights are missing, cut off, or something else."""
    return [tensor for file in _weight_files(directory) for tensor in _read_header(file)]


def _weight_files(directory: Path) -> list[Path]:
    """All files of the model, each there. A single file goes before an index, as in transformers."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"--model {directory}: has no weights ({SINGLE} or {INDEX}); --load-format dummy does without")
    try:
        weight_map: object = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{index}: must be a JSON object with a weight_map") from exc
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map must map tensor names to files")
    files = [directory / str(name) for name in sorted(set(cast(dict[str, str], weight_map).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"--model {directory}: {missing[0]} is in the index but not there ({len(missing)} files missing)")
    return files


def _read_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        # The pointer that Git LFS leaves in place of a file reads as an absurd header size.
        header = opened.read(header_size) if header_size <= size - 8 else b""
    try:
        entries: dict[str, Any] = json.loads(header)
        tensors = [
            StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), 8 + header_size + start, end - start)
            for name, entry in entries.items()
            if name != "__metadata__"
            for start, end in [entry["data_offsets"]]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"--model {file}: is not a safetensors file, or its header is cut off") from exc
    whole_size = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + header_size)
    if size < whole_size:
        raise ConfigError(f"--model {file}: is cut off at {size} of {whole_size} bytes")
    return tensors
