"""Reading tensors out of safetensors files into memory of our own.

Mapped files would be quicker to open, but their pages count as this process's memory as well as the converted copy does, load
only when the first step touches them, and turn into SIGBUS when somebody truncates the file.
"""

from collections.abc import Iterable
from io import FileIO

import torch

from stages.errors import ConfigError
from stages.model.safetensors import StoredTensor

# A tensor stored in another dtype is converted piece by piece, so that no second copy of it exists.
PIECE_BYTES = 1 << 20

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


def read_tensors(wanted: Iterable[StoredTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors by name, those of a floating type converted to ``dtype``."""
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
                _read_into(file, result)
            else:
                _read_converted(file, result, piece_buffer.view(source_dtype))
        tensors[stored.name] = result
    return tensors


def _read_converted(file: FileIO, result: torch.Tensor, buffer: torch.Tensor) -> None:
    for piece in result.view(-1).split(len(buffer)):
        stored = buffer[: len(piece)]
        _read_into(file, stored)
        piece.copy_(stored)


def _read_into(file: FileIO, tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor with the next bytes of the file."""
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    while view:
        count = file.readinto(view)  # one call reads at most 2 GiB
        if not count:
            raise ConfigError(f"--model {file.name}: became shorter while it was read")
        view = view[count:]
