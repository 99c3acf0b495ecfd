"""A rank's verdict on what it received, as its kernels keep it on the device, and their report to the host."""

import ctypes
from contextlib import suppress

from stages.cuda import CudaDevice
from stages.errors import CudaError
from stages.kernels import REPORT_BYTES
from stages.topology import PPGroup
from stages.transport.ring import SLOT_HEADER_BYTES, BoundaryHeader, check_header, header_of, unpack_header


class Verdict:
    """``word`` is the verdict's address on the device: 1 until the first mismatch; ``report`` that of what ``Kernels`` tell of
    it, in pinned memory."""

    def __init__(self, device: CudaDevice, group: PPGroup) -> None:
        driver = device.driver
        self._device = device
        self._group = group
        self._is_freed = False
        self.word = driver.alloc(256)
        self.report = driver.alloc_host(256)
        ctypes.memset(self.report, 0, 256)
        driver.memset_d32_async(self.word, 1, 1, device.rescue)
        driver.synchronize(device.rescue)

    def check(self, step_id: int) -> None:
        """Raise ``HeaderMismatch`` when the device has seen one up to this step."""
        if self._is_freed:
            return
        data = ctypes.string_at(self.report, REPORT_BYTES)
        if not data[0]:
            return
        expected = header_of(data[4 + SLOT_HEADER_BYTES :])
        if expected.step_id > step_id:
            return
        sender = self._group.prev_rank if isinstance(expected, BoundaryHeader) else self._group.last_rank
        check_header(expected, unpack_header(type(expected), data[4:]), receiver=self._group.rank, sender=sender)

    def close(self) -> None:
        """Once nothing on the device uses it; the word is freed with the device's other retired memory. May be called twice."""
        if not self._is_freed:
            self._is_freed = True
            self._device.retire(self.word)
            with suppress(CudaError):  # after a device error nothing can be freed, nor needs to be
                self._device.driver.free_host(self.report)
