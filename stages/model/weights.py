"""Reading tensors out of safetensors files into memory of our own.

Mapped files would be quicker to open, but their pages count as this process's memory as well as the converted copy does, load
only when the first step touches them, and turn into SIGBUS when somebody truncates the file.
"""

from collections.abc import Callable, Iterable
from io import FileIO

import torch

from stages.errors import ConfigError
from stages.model.safetensors import StoredTensor

# A tensor stored in another dtype is converted piece by piece, so that no second copy of it exists.
PIECE_BYTES = 1 << 20
# What is read in one call: little enough that progress can be told of while it lasts.
READ_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes have been read, of how many."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def no_progress(_loaded_bytes: int, _total_bytes: int) -> None:
    """For whoever does not show it."""


def read_tensors(
    wanted: Iterable[StoredTensor], dtype: torch.dtype, progress: Progress = no_progress
) -> dict[str, torch.Tensor]:
    """The tensors by name, those of a floating type converted to ``dtype``. ``progress`` is told of every piece."""
    wanted = list(wanted)
    total_bytes = sum(stored.num_bytes for stored in wanted)
    loaded_bytes = 0

    def add(num_bytes: int) -> None:
        nonlocal loaded_bytes
        loaded_bytes += num_bytes
        progress(loaded_bytes, total_bytes)

    tensors: dict[str, torch.Tensor] = {}
    # One for all: a new one per tensor would leave holes between them that nothing fits into.
    piece_buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for stored in wanted:
        source_dtype = _DTYPES.get(stored.dtype)
        if source_dtype is None:
            raise ConfigError(f"--model {stored.file}: {stored.name} is stored as {stored.dtype}: weights cannot be quantised")
        result = torch.empty(stored.shape, dtype=dtype if source_dtype.is_floating_point else source_dtype)
        if result.numel() * source_dtype.itemsize != stored.num_bytes:
            raise ConfigError(f"--model {stored.file}: {stored.name} has {stored.num_bytes} bytes, not what its shape needs")
        with FileIO(stored.file) as file:
            file.seek(stored.start)
            if result.dtype == source_dtype:
                _read_into(file, result, add)
            else:
                _read_converted(file, result, piece_buffer.view(source_dtype), add)
        tensors[stored.name] = result
    return tensors


def _read_converted(file: FileIO, result: torch.Tensor, buffer: torch.Tensor, add: Callable[[int], None]) -> None:
    for piece in result.view(-1).split(len(buffer)):
        stored = buffer[: len(piece)]
        _read_into(file, stored, add)
        piece.copy_(stored)


def _read_into(file: FileIO, tensor: torch.Tensor, add: Callable[[int], None]) -> None:
    """Fill a contiguous tensor with the next bytes of the file; ``add`` is told how many each read gave."""
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    while view:
        count = file.readinto(view[:READ_BYTES])
        if not count:
            raise ConfigError(f"--model {file.name}: became shorter while it was read")
        add(count)
        view = view[count:]
