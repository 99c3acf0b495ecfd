"""GPUs for tests: the stand-in everywhere, a real one where there is one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stages.cuda import CudaDevice
from stages.driver import Driver
from tests.emulated_cuda import emulation

GPUS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def gpu_device(kind: str) -> Iterator[CudaDevice]:
    if kind == "cuda":
        device = CudaDevice(Driver())
        yield device
        device.close()
        return
    with emulation() as emulated:
        device = emulated.device()
        yield device
        emulated.reset()
        device.close()
