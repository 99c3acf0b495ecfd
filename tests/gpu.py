"""GPUs for tests: the stand-in everywhere, a real one where there is one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stages.cuda import CudaDevice, CudaStream
from stages.driver import Driver
from tests.emulated_cuda import emulation

# As the ranks have them: a kernel that is loaded while a wait is pending waits for it, and so do streams that share a queue.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

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


class Gate:
    """A word that streams wait for. Closing it lets every stream go on, and closes what is left of the device's streams."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._driver = device.driver
        self._word = self._driver.alloc(256)
        self._driver.memset_d32_async(self._word, 0, 64, device.rescue)
        self._driver.synchronize(device.rescue)
        self._count = 0

    def stop(self, stream: CudaStream) -> int:
        """Have ``stream`` wait; what ``open`` takes."""
        self._count += 1
        self._driver.wait_value64(stream.handle, self._word, self._count)
        return self._count

    def open(self, number: int | None = None) -> None:
        """Let streams go on: as far as ``number``, or all of them."""
        self._driver.write_value64(self._device.rescue, self._word, self._count if number is None else number)

    def close(self) -> None:
        self.open()
        self._driver.synchronize(self._device.rescue)
        for stream in list(self._device._streams):
            stream.close()
        self._driver.free(self._word)
