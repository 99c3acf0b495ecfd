"""What the operating system says of this machine, from /proc and /sys."""

import os
import re
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``cpu_quota`` is the control group's share in CPUs, None without one; ``memory_limit_bytes`` likewise.

    ``available_bytes`` is what new processes may use, whichever limit is lower. ``numa_nodes`` has the CPUs of each node as
    the kernel writes them, as '0-15'. ``gpu_module`` is the version of the loaded NVIDIA kernel module, '' without one.
    """

    cpu_model: str
    num_cpus: int
    num_usable_cpus: int
    cpu_quota: float | None
    numa_nodes: list[str]
    total_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    shm_bytes: int
    max_open_files: int
    gpu_module: str


def read_machine(root: Path = _ROOT) -> Machine:
    """``root`` holds ``proc`` and ``sys``."""
    memory = _meminfo(root)
    limit = _memory_limit(root)
    available = memory.get("MemAvailable", 0)
    if limit is not None:
        available = min(available, max(0, limit - _number(root / "sys/fs/cgroup/memory.current", 0)))
    return Machine(
        cpu_model=_found(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo")) or "unknown",
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(root),
        numa_nodes=[
            _read(node / "cpulist").strip()
            for node in sorted(root.glob("sys/devices/system/node/node*"), key=lambda node: int(node.name[4:]))
        ],
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=available,
        memory_limit_bytes=limit,
        shm_bytes=_shm_bytes(root),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpu_module=_found(r"Module\D*([0-9]+(?:\.[0-9]+)+)", _read(root / "proc/driver/nvidia/version")),
    )


def _read(path: Path) -> str:
    """Empty when it is not there: kernels and sandboxes differ in what they show."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _number(path: Path, default: int) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else default


def _meminfo(root: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def _memory_limit(root: Path) -> int | None:
    return _number(root / "sys/fs/cgroup/memory.max", 0) or None


def _cpu_quota(root: Path) -> float | None:
    found = re.fullmatch(r"(\d+) (\d+)", _read(root / "sys/fs/cgroup/cpu.max").strip())
    return int(found[1]) / int(found[2]) if found else None


def _shm_bytes(root: Path) -> int:
    with suppress(OSError):
        stat = os.statvfs(root / "dev/shm")
        return stat.f_bavail * stat.f_frsize
    return 0
