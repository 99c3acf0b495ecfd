"""The sequence slots of a rank on a GPU."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress

import torch

from stages.cuda import CudaDevice, CudaStream
from stages.device import Stream
from stages.errors import CudaError
from stages.kernels import Kernels
from stages.plan import PlanRow
from stages.slots import SlotTable, Tokens

NO_SLOT = -1


class DeviceSlotTable(SlotTable):
    """``last_tokens`` and ``positions`` are on the GPU; generations stay on the host.

    Tokens are stored by a kernel, which knows no generations: whose slot it is by then is decided by order instead. A plan that
    opens a slot for which the tokens of an earlier step are still to come waits for them first (``reopened_after``), so what a
    late message stores is overwritten by the new owner. That wait is rare: a slot is mostly freed by its last result.

    At most ``max_steps`` steps are in flight.
    """

    def __init__(
        self,
        num_slots: int,
        max_sample_len: int,
        device: CudaDevice,
        torch_device: torch.device,
        kernels: Kernels,
        max_steps: int,
    ) -> None:
        super().__init__(num_slots, max_sample_len)
        self.last_tokens = self.last_tokens.to(torch_device)
        self.positions = self.positions.to(torch_device)
        self._kernels = kernels
        self._driver = device.driver
        self._last_step = [-1] * num_slots  # the last step that sampled each slot
        self._num_entries = max_steps + 1
        self._num_scattered = 0
        self._indices = self._driver.alloc_host(4 * num_slots * self._num_entries)

    def enqueue_scatter(self, stream: Stream, step_id: int, rows: Sequence[PlanRow], tokens: Tokens) -> None:
        assert isinstance(stream, CudaStream)
        ids, num_sampled, _ = tokens
        for row in rows:
            self.check_slot(row.slot)
            self._last_step[row.slot] = step_id
        entry = self._indices + self._num_scattered % self._num_entries * 4 * self.num_slots
        self._num_scattered += 1
        slots = [row.slot if self.is_current(row.slot, row.generation) else NO_SLOT for row in rows]
        self.num_stale_rows += slots.count(NO_SLOT)
        (ctypes.c_int32 * len(rows)).from_address(entry)[:] = slots
        self._kernels.scatter_tokens(
            stream.handle,
            ids.data_ptr(),
            num_sampled.data_ptr(),
            entry,
            len(rows),
            ids.shape[1],
            self.last_tokens.data_ptr(),
            self.positions.data_ptr(),
            self.num_slots,
            self.max_sample_len,
        )

    def reopened_after(self, rows: Sequence[PlanRow]) -> list[int]:
        return [self._last_step[row.slot] for row in rows if row.sampling is not None and self._last_step[row.slot] >= 0]

    def close(self) -> None:
        if self._indices:
            with suppress(CudaError):  # after a device error nothing can be freed, nor needs to be
                self._driver.free_host(self._indices)
            self._indices = 0
