"""Answers a ``ProbeRequest``: tries what ranks would do, and says why what fails does."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import transformers

from stages.assembly import gpu_transports, offered_transports, open_gpu
from stages.driver import Driver
from stages.errors import CudaError, StagewireError, one_line
from stages.model.build import stage_class
from stages.model.load import load_config, weight_bytes
from stages.model.slice import default_split, resolve_dtype
from stages.model.source import ModelSource
from stages.probe import GpuProbe, ModelProbe, ProbeReport, ProbeRequest, RankProbe
from stages.topology import check_layer_split, stage_infos
from stages.transport.copy_engine import copy_engine_obstacle, nvlink_peers
from stages.transport.memory import MemoryHub


def probe(request: ProbeRequest, driver: Driver | CudaError) -> ProbeReport:
    """``driver`` is the error of making one where there is none."""
    has_driver = isinstance(driver, Driver)
    gpus = probe_gpus(driver) if has_driver else []
    return ProbeReport(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        transformers=transformers.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        driver_version=driver.version() if has_driver else 0,
        gpus=gpus,
        gpu_obstacle="" if gpus else "the CUDA driver lists no GPU" if has_driver else str(driver),
        ranks=probe_ranks(request.devices),
        model=probe_model(request) if request.model_path else None,
    )


def probe_gpus(driver: Driver) -> list[GpuProbe]:
    gpus: list[GpuProbe] = []
    for ordinal in range(driver.device_count()):
        try:
            driver.make_current(ordinal)
            obstacle = copy_engine_obstacle(driver)
        except CudaError as exc:
            obstacle = str(exc)
        gpus.append(
            GpuProbe(
                name=driver.device_name(ordinal),
                uuid=driver.device_uuid(ordinal),
                total_bytes=driver.device_bytes(ordinal),
                nvlink_peers=nvlink_peers(driver, ordinal),
                memory_operations=obstacle,
            )
        )
    return gpus


def probe_ranks(devices: Sequence[str]) -> list[RankProbe]:
    hub = MemoryHub()  # they could be in one process
    found: dict[str, RankProbe] = {}
    for device in devices:
        if device not in found:
            found[device] = RankProbe(offered_transports(hub), "", []) if device == "cpu" else _probe_gpu_rank(device)
    return [found[device] for device in devices]


def _probe_gpu_rank(device: str) -> RankProbe:
    try:
        gpu = open_gpu(device)
        driver, ordinal = gpu.device.driver, gpu.device.ordinal
        return RankProbe(gpu_transports(gpu), driver.device_uuid(ordinal), nvlink_peers(driver, ordinal))
    except StagewireError as exc:
        return RankProbe({}, "", [], one_line(exc))


def probe_model(request: ProbeRequest) -> ModelProbe:
    """Whether transformers and our attention can do the model, and what each rank's weights take. Reads no weights."""
    try:
        source = ModelSource("", Path(request.model_path), None, request.load_format)
        device = torch.device(request.devices[0])
        dtype = resolve_dtype(request.dtype, device)
        num_stages = len(request.devices)
        split = default_split(source, dtype, num_stages, max_model_len=request.max_model_len or None)
        config = load_config(source.path)
        if request.layer_split:
            check_layer_split(request.layer_split, sum(split), num_stages)
            split = request.layer_split
        with torch.device("meta"):
            slices = [stage_class(config, info)._from_config(config, dtype=dtype) for info in stage_infos(split)]
    except StagewireError as exc:
        return ModelProbe(obstacle=one_line(exc))
    return ModelProbe(str(dtype).removeprefix("torch."), list(split), [weight_bytes(slice_) for slice_ in slices])


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    try:
        driver: Driver | CudaError = Driver()
    except CudaError as exc:
        driver = exc
    sys.stdout.buffer.write(msgspec.json.encode(probe(request, driver)))


if __name__ == "__main__":
    main()
