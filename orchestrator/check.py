"""``stagewire check``: what this machine can do, and whether it can serve what the options ask for."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from orchestrator import __version__
from orchestrator.config import ServeConfig
from orchestrator.devices import CPU, check_devices, choose_devices, gpus_found
from orchestrator.launch import rank_environment
from orchestrator.machine import Machine, read_machine
from orchestrator.serve import bind, check_model
from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError, StagewireError, one_line
from stages.model.source import ModelConfig, ModelSource, locate_model, read_model_config
from stages.plan import Offer
from stages.probe import GpuProbe, ProbeReport, ProbeRequest, probe_command
from stages.transport.choice import TRANSPORTS, choose_transport
from stages.transport.links import close_fds, create_shared_links

DRAINED = 0
FAILED = 1
SHARE_OF_GPU_MEMORY = 0.85  # what ranks take of a GPU at most
FILES_OF_WORKER = 64  # descriptors besides one for each connection: sockets, pipes, libraries
_MIB = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A line of the table. ``obstacle`` says why the options cannot be served because of it; empty when they can.
    ``is_missing``: something that this machine cannot do, and these options do not need."""

    subject: str
    found: str
    obstacle: str = ""
    is_missing: bool = False

    @property
    def mark(self) -> str:
        return "NO" if self.obstacle else "-" if self.is_missing else "ok"


def check(config: ServeConfig) -> int:
    """Print the table; 0 when what ``config`` asks for can be served here, else 1 and the first reason as the last line."""
    findings = look(config)
    print(as_table(findings))  # noqa: T201
    obstacle = next((finding.obstacle for finding in findings if finding.obstacle), "")
    if obstacle:
        raise StagewireError(f"cannot be served here: {obstacle}")
    return DRAINED


def look(config: ServeConfig) -> list[Finding]:
    """Everything, in the order of the table. Never raises for what it finds."""
    machine = read_machine()
    findings = [*_versions(), *_of_machine(machine, config)]
    obstacles: list[Finding] = []
    source, model = _model(config, obstacles)
    found = gpus_found()
    num_ranks = config.pipeline_parallel_size
    devices, why = _attempt("devices", obstacles, lambda: choose_devices(config.device, num_ranks, found)) or ([], "")
    if devices:
        _attempt("devices", obstacles, lambda: check_devices(config, devices))
    request = ProbeRequest(
        devices=devices,
        model_path=str(source.path) if source is not None and model is not None and devices else "",
        load_format=config.load_format,
        dtype=config.dtype,
        layer_split=list(config.layer_split or ()),
        max_model_len=config.max_model_len or 0,
    )
    report = _attempt("torch", obstacles, lambda: run_probe(request, config))
    if report is not None:
        findings += [*_of_torch(report), *_of_gpus(report, machine)]
    if devices:
        findings.append(Finding("devices", f"{', '.join(devices)} ({why})"))
    if report is not None and devices:
        findings += _of_ranks(report, devices)
        findings += _of_transports(report, config.pp_transport)
    if source is not None:
        findings.append(Finding("model", str(source.path if source.gguf is None else source.gguf)))
        findings += _of_model(source, model, report, machine, config, devices)
    findings += obstacles
    findings.append(_port(config))
    return findings


def as_table(findings: Sequence[Finding]) -> str:
    width = max(len(finding.subject) for finding in findings)
    return "\n".join(
        f"{finding.mark:<3} {finding.subject:<{width}}  {finding.obstacle or finding.found}" for finding in findings
    )


def run_probe(request: ProbeRequest, config: ServeConfig) -> ProbeReport:
    """Have a process that loads torch look; ``StagewireError`` with its last line when it fails."""
    num_threads = config.num_threads(config.pipeline_parallel_size)
    try:
        done = subprocess.run(
            probe_command(),
            input=msgspec.json.encode(request),
            capture_output=True,
            env=rank_environment(os.environ, num_threads),
            timeout=config.start_timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StagewireError(
            f"--start-timeout {config.start_timeout:g}: loading torch and looking at GPUs took longer"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise StagewireError(f"a process that loads torch failed: {lines[-1] if lines else f'code {done.returncode}'}")
    return msgspec.json.decode(done.stdout, type=ProbeReport)


# ---- lines of the table ---------------------------------------------------------------------------------------------------


def _attempt(subject: str, obstacles: list[Finding], look: Callable[[], T]) -> T | None:
    """What ``look`` returns, or None and its error as an obstacle."""
    try:
        return look()
    except StagewireError as exc:
        obstacles.append(Finding(subject, "", one_line(exc)))
        return None


def _versions() -> list[Finding]:
    python = f"{platform.python_version()} ({sys.executable})"
    return [
        Finding("stagewire", __version__),
        Finding("python", python),
        Finding("uvloop", importlib.metadata.version("uvloop")),
    ]


def _of_machine(machine: Machine, config: ServeConfig) -> list[Finding]:
    quota = "" if machine.cpu_quota is None else f", the control group gives {machine.cpu_quota:g}"
    limit = "" if machine.memory_limit_bytes is None else f", the control group's limit is {_size(machine.memory_limit_bytes)}"
    nodes = "; ".join(f"node {i}: CPUs {cpus}" for i, cpus in enumerate(machine.numa_nodes)) or "not shown"
    num_files = FILES_OF_WORKER + config.max_num_seqs + config.max_queue
    return [
        Finding("CPUs", f"{machine.num_usable_cpus} usable of {machine.num_cpus} ({machine.cpu_model}){quota}"),
        Finding("NUMA", nodes),
        Finding("memory", f"{_size(machine.available_bytes)} available of {_size(machine.total_bytes)}{limit}"),
        Finding("/dev/shm", f"{_size(machine.shm_bytes)} free; not used: rings are memfds and count as memory"),
        _open_files(machine.max_open_files, num_files),
    ]


def _open_files(allowed: int, needed: int) -> Finding:
    subject = "open files"
    if allowed >= needed:
        return Finding(subject, f"{allowed}, a full queue needs {needed}")
    return Finding(
        subject, "", f"ulimit -n is {allowed}: must be at least {needed} for --max-num-seqs and --max-queue connections"
    )


def _of_torch(report: ProbeReport) -> list[Finding]:
    build = f"built for CUDA {report.cuda}" if report.cuda else "built without CUDA"
    return [
        Finding("torch", f"{report.torch}, {build}, {report.cpu_capability}"),
        Finding("transformers", report.transformers),
    ]


def _of_gpus(report: ProbeReport, machine: Machine) -> list[Finding]:
    if not report.gpus:
        return [Finding("GPUs", f"none: {report.gpu_obstacle}", is_missing=True)]
    version = report.driver_version
    findings = [Finding("driver", f"{machine.gpu_module or 'unknown version'}, CUDA {version // 1000}.{version % 1000 // 10}")]
    ordinals = {gpu.uuid: ordinal for ordinal, gpu in enumerate(report.gpus)}
    for ordinal, gpu in enumerate(report.gpus):
        findings.append(Finding(f"cuda:{ordinal}", f"{gpu.name}, {_size(gpu.total_bytes)}, {_nvlink(gpu, ordinals)}"))
        is_missing = gpu.memory_operations != ""
        works = gpu.memory_operations or "stream memory operations work (tried)"
        findings.append(Finding(f"cuda:{ordinal}", works, is_missing=is_missing))
    return findings


def _nvlink(gpu: GpuProbe, ordinals: dict[str, int]) -> str:
    peers = sorted(ordinals[uuid] for uuid in gpu.nvlink_peers)
    return "NVLink to " + ", ".join(f"cuda:{peer}" for peer in peers) if peers else "no NVLink"


def _of_ranks(report: ProbeReport, devices: Sequence[str]) -> list[Finding]:
    failed = dict(zip(devices, (rank.obstacle for rank in report.ranks), strict=True))
    return [Finding(device, "", obstacle) for device, obstacle in failed.items() if obstacle]


def _of_transports(report: ProbeReport, wanted: str) -> list[Finding]:
    """Whether each transport can be used, and what these options lead to."""
    if any(rank.obstacle for rank in report.ranks):
        return []
    offers = [_offer(rank.transports, rank.device_uuid, rank.nvlink_peers) for rank in report.ranks]
    findings: list[Finding] = []
    for name in TRANSPORTS if len(offers) > 1 else ():
        try:
            choose_transport(offers, name)
            findings.append(Finding(name, "can carry hidden states between these ranks"))
        except StagewireError as exc:
            reason = one_line(exc).removeprefix(f"--pp-transport {name}: ")
            findings.append(Finding(name, reason, is_missing=True))
    try:
        chosen, reason = choose_transport(offers, wanted)
        obstacle = _shared_memory_obstacle(len(offers)) if chosen == "shared_memory" else ""
        findings.append(Finding("transport", f"{chosen}: {reason}", obstacle))
    except StagewireError as exc:
        findings.append(Finding("transport", "", one_line(exc)))
    return findings


def _shared_memory_obstacle(num_ranks: int) -> str:
    """Tried: sandboxes may refuse sealed memfds or eventfds."""
    try:
        fds = create_shared_links(num_ranks, epoch=0, boundary_slot_bytes=64, token_slot_bytes=64, ring_slots=1, token_slots=1)
    except OSError as exc:
        return f"shared_memory: its links cannot be made: {exc.strerror}"
    for rank_fds in fds:
        close_fds(rank_fds)
    return ""


def _offer(transports: dict[str, str], device_uuid: str, nvlink_peers: list[str]) -> Offer:
    """As a rank of this host would make it, with what the choice of a transport looks at."""
    return Offer(
        host_id="",
        process_id=0,
        device="",
        transports=transports,
        boundary=[],
        first_layer=0,
        end_layer=0,
        num_layers=0,
        num_parameters=0,
        slice_bytes=0,
        load_growth_bytes=0,
        load_seconds=0.0,
        num_threads=0,
        block_size=0,
        block_bytes=0,
        max_blocks=0,
        tied_embeddings=False,
        embedding_checksum=0,
        device_uuid=device_uuid,
        nvlink_peers=nvlink_peers,
    )


def _model(config: ServeConfig, obstacles: list[Finding]) -> tuple[ModelSource | None, ModelConfig | None]:
    """Where the model is, and its config; None for what is not there, or not yet."""
    source = _attempt("model", obstacles, lambda: locate_model(config.model, config.load_format))
    if source is None or not source.is_converted:
        return source, None
    model = _attempt("model", obstacles, lambda: _read_and_check(source, config))
    if config.load_format != "dummy" or (source.path / "tokenizer.json").is_file():
        _attempt("tokenizer", obstacles, lambda: Tokenizer.from_directory(source.path))
    return source, model


def _read_and_check(source: ModelSource, config: ServeConfig) -> ModelConfig:
    model = read_model_config(source.path)
    check_model(config, model)
    return model


def _of_model(
    source: ModelSource,
    model: ModelConfig | None,
    report: ProbeReport | None,
    machine: Machine,
    config: ServeConfig,
    devices: Sequence[str],
) -> list[Finding]:
    if not source.is_converted:
        return [Finding("model", "is converted to safetensors by the first start; what it needs is known then")]
    if model is None or report is None or report.model is None:
        return []
    found = report.model
    if found.obstacle:
        return [Finding("model", "", found.obstacle)]
    sizes = ", ".join(
        f"{layers} layers {_size(size)}" for layers, size in zip(found.layer_split, found.slice_bytes, strict=True)
    )
    described = Finding(
        "model", f"{model.model_type}, {model.max_model_len} tokens, {found.dtype}; weights of each rank: {sizes}"
    )
    return [described, *_memory_obstacles(found.slice_bytes, report, machine, config, devices)]


def _memory_obstacles(
    slice_bytes: Sequence[int], report: ProbeReport, machine: Machine, config: ServeConfig, devices: Sequence[str]
) -> list[Finding]:
    """Where weights, and the KV cache as far as it was given, do not fit."""
    findings: list[Finding] = []
    kv_bytes = config.kv_cache_memory_bytes or 0
    for device in dict.fromkeys(devices):
        sizes = [size + kv_bytes for size, on in zip(slice_bytes, devices, strict=True) if on == device]
        if device == CPU:
            room, where = machine.available_bytes, "memory available"
        else:
            total = report.gpus[int(device.removeprefix("cuda:"))].total_bytes
            room, where = int(total * SHARE_OF_GPU_MEMORY), f"usable of {device}"
        if sum(sizes) > room:
            needs = f"{len(sizes)} ranks need {_size(sum(sizes))}, the {where} is {_size(room)}"
            findings.append(Finding("model", "", needs))
    return findings


def _port(config: ServeConfig) -> Finding:
    try:
        bind(config.host, config.port).close()
    except ConfigError as exc:
        return Finding("port", "", one_line(exc))
    return Finding("port", f"{config.port} is free on {config.host}" if config.port else "0: a free one is taken")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / _MIB:.0f} MiB"
