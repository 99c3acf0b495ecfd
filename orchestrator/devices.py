"""Which device each rank computes on."""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config import ServeConfig
from stages.driver import Driver
from stages.errors import ConfigError, CudaError

CPU = "cpu"


def gpus_found() -> tuple[int, str]:
    """The number of GPUs that ranks could use, and when there are none, why. Loads no torch and makes no CUDA context."""
    torch = importlib.util.find_spec("torch")
    locations = list(torch.submodule_search_locations or []) if torch is not None else []
    if not any((Path(location) / "lib" / "libtorch_cuda.so").exists() for location in locations):
        return 0, f"torch {importlib.metadata.version('torch')} is built without CUDA"
    try:
        count = Driver().device_count()
    except CudaError as exc:
        return 0, str(exc)
    return count, "" if count else "the CUDA driver lists no GPU"


def choose_devices(wanted: str, num_ranks: int, found: tuple[int, str]) -> tuple[list[str], str]:
    """The device of each rank, and why. ``found`` is what ``gpus_found`` gave. ``ConfigError`` when it is impossible."""
    num_gpus, obstacle = found
    if wanted == CPU:
        return [CPU] * num_ranks, "asked for"
    if wanted == "auto":
        if num_gpus >= num_ranks:
            return [f"cuda:{rank}" for rank in range(num_ranks)], "there is a GPU for every rank"
        return [CPU] * num_ranks, obstacle or f"{num_gpus} GPUs are too few for {num_ranks} ranks"
    if not num_gpus:
        raise ConfigError(f"--device {wanted}: needs a GPU, but {obstacle}")
    if wanted == "cuda":
        if num_gpus < num_ranks:
            raise ConfigError(
                f"--device cuda: needs a GPU for each of {num_ranks} ranks, there are {num_gpus}; "
                "a list such as cuda:0,cuda:0 lets ranks share one"
            )
        return [f"cuda:{rank}" for rank in range(num_ranks)], "asked for"
    devices = [name.strip() for name in wanted.split(",")]
    if len(devices) != num_ranks:
        raise ConfigError(f"--device {wanted}: must name a device for each of {num_ranks} ranks, names {len(devices)}")
    for name in devices:
        if name != CPU and int(name.removeprefix("cuda:")) >= num_gpus:
            raise ConfigError(f"--device {wanted}: there is no {name}, the GPUs are cuda:0 to cuda:{num_gpus - 1}")
    return devices, "asked for"


def check_devices(config: ServeConfig, devices: Sequence[str]) -> None:
    """``ConfigError`` when other options do not fit the devices."""
    if config.pp_transport == "memory" and any(device != CPU for device in devices):
        raise ConfigError("--pp-transport memory: must be used with --device cpu")
