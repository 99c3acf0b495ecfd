"""Small tensors from the host to wherever a stage computes, without waiting for the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

CPU = torch.device("cpu")


def upload(
    values: Sequence[int] | Sequence[float] | npt.NDArray[np.float64], dtype: torch.dtype, device: torch.device = CPU
) -> torch.Tensor:
    """``values`` as a tensor ``[n]`` on ``device``, ready in the order of torch's current stream.

    A GPU copies it from pinned memory, which torch keeps until the copy is done; from ordinary memory the call would wait
    for the stream, and with it for a peer.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    if isinstance(values, np.ndarray):  # which torch.tensor does not pin
        return torch.from_numpy(values).to(dtype).pin_memory().to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
