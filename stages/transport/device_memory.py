"""Tensors over memory that is not torch's."""

import ctypes

import torch


class _CudaArray:
    """What torch reads of memory on a GPU that somebody else owns: https://numba.readthedocs.io, CUDA array interface 3."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
        }


def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """``num_bytes`` at ``address`` as a uint8 tensor ``[num_bytes]`` on ``device``. Whoever owns the memory outlives it."""
    if device.type == "cuda":
        return torch.as_tensor(_CudaArray(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
