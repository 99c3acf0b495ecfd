"""What ranks could do here, found out in a process of its own that loads torch. No torch here.

``python -m stages.probe_main`` reads a ``ProbeRequest`` from standard input and writes a ``ProbeReport``, both as JSON.
"""

import sys

import msgspec


class ProbeRequest(msgspec.Struct, frozen=True):
    """``devices`` has one for each rank. ``model_path`` is a Hugging Face directory, empty when there is none to look at;
    the fields after it are as in ``Setup``, ``max_model_len`` 0 for the model's own."""

    devices: list[str]
    model_path: str
    load_format: str
    dtype: str
    layer_split: list[int]
    max_model_len: int


class GpuProbe(msgspec.Struct, frozen=True):
    """``memory_operations`` is why streams cannot wait for and write memory there, empty when they did."""

    name: str
    uuid: str
    total_bytes: int
    nvlink_peers: list[str]
    memory_operations: str


class RankProbe(msgspec.Struct, frozen=True):
    """As in ``Offer``. ``obstacle`` is why nothing can be computed on the device, empty when it can."""

    transports: dict[str, str]
    device_uuid: str
    nvlink_peers: list[str]
    obstacle: str = ""


class ModelProbe(msgspec.Struct, frozen=True):
    """``layer_split`` and, for each rank, the bytes of its weights. ``obstacle`` is why the model cannot be served."""

    dtype: str = ""
    layer_split: list[int] = []
    slice_bytes: list[int] = []
    obstacle: str = ""


class ProbeReport(msgspec.Struct, frozen=True):
    """``cuda`` is what torch is built with, empty without it; ``cpu_capability`` its name for the instructions it uses.
    ``gpu_obstacle`` is why ``gpus`` is empty. ``model`` is None when none was asked for."""

    torch: str
    cuda: str
    transformers: str
    cpu_capability: str
    driver_version: int
    gpus: list[GpuProbe]
    gpu_obstacle: str
    ranks: list[RankProbe]
    model: ModelProbe | None


def probe_command() -> list[str]:
    return [sys.executable, "-m", "stages.probe_main"]
