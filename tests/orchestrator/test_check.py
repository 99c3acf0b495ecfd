"""What ``stagewire check`` finds, from a machine that the test makes up, and once from this one."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import check as checking
from orchestrator.check import Finding, as_table, check, look
from orchestrator.config import ServeConfig
from orchestrator.machine import Machine, read_machine
from stages.errors import StagewireError
from stages.probe import GpuProbe, ModelProbe, ProbeReport, ProbeRequest, RankProbe

GIB = 2**30
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip
CPU_RANK = RankProbe({"copy_engine": "computes on a CPU", "shared_memory": "", "memory": ""}, "", [])


def machine(**fields: object) -> Machine:
    values: dict[str, object] = {
        "cpu_model": "Some CPU", "num_cpus": 8, "num_usable_cpus": 4, "cpu_quota": None, "numa_nodes": ["0-3", "4-7"],
        "total_bytes": 64 * GIB, "available_bytes": 32 * GIB, "memory_limit_bytes": None, "shm_bytes": GIB,
        "max_open_files": 4096, "gpu_module": "580.95.05",
    }  # fmt: skip
    return Machine(**{**values, **fields})  # type: ignore[arg-type]


def report(ranks: list[RankProbe], model: ModelProbe | None = None, gpus: list[GpuProbe] | None = None) -> ProbeReport:
    obstacle = "" if gpus else "the CUDA driver cannot be loaded"
    return ProbeReport("2.13.0", "13.0", "5.23.0", "AVX512", 13000, gpus or [], obstacle, ranks, model)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ProbeRequest]]:
    """Puts a machine and a report in the place of this one's; returns the requests that are made."""

    def use(report: ProbeReport, machine: Machine, gpus: tuple[int, str] = (0, "no GPU")) -> list[ProbeRequest]:
        requests: list[ProbeRequest] = []
        monkeypatch.setattr(checking, "read_machine", lambda: machine)
        monkeypatch.setattr(checking, "gpus_found", lambda: gpus)
        monkeypatch.setattr(checking, "run_probe", lambda request, config: requests.append(request) or report)
        return requests

    return use


def obstacles(findings: list[Finding]) -> list[str]:
    return [finding.obstacle for finding in findings if finding.obstacle]


def served(model: str, **options: object) -> ServeConfig:
    return ServeConfig(model=model, load_format="dummy", port=0, **options)  # type: ignore[arg-type]


def test_what_can_be_served(on: Callable[..., list[ProbeRequest]], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ModelProbe("float32", [2, 2], [3 * GIB, 2 * GIB])
    requests = on(report([CPU_RANK] * 2, found), machine(cpu_quota=1.5, memory_limit_bytes=40 * GIB))
    assert check(served(model)) == 0
    assert requests == [ProbeRequest(["cpu", "cpu"], model, "dummy", "auto", [], 0)]
    table = capsys.readouterr().out
    for line in (
        "ok  CPUs           4 usable of 8 (Some CPU), the control group gives 1.5",
        "ok  NUMA           node 0: CPUs 0-3; node 1: CPUs 4-7",
        "ok  memory         32.0 GiB available of 64.0 GiB, the control group's limit is 40.0 GiB",
        "-   GPUs           none: the CUDA driver cannot be loaded",
        "ok  devices        cpu, cpu (no GPU)",
        "-   copy_engine    rank 0: computes on a CPU",
        "ok  shared_memory  can carry hidden states between these ranks",
        "ok  model          llama, 256 tokens, float32; weights of each rank: 2 layers 3.0 GiB, 2 layers 2.0 GiB",
        "ok  port           0: a free one is taken",
    ):
        assert line in table.splitlines()
    assert "NO " not in table


def test_gpus_and_their_links(on: Callable[..., list[ProbeRequest]], model: str) -> None:
    gpus = [
        GpuProbe("A GPU", "GPU-a", 80 * GIB, ["GPU-b"], ""),
        GpuProbe("A GPU", "GPU-b", 80 * GIB, ["GPU-a"], "cuStreamWaitValue64: not supported"),
    ]
    ranks = [RankProbe({"copy_engine": ""}, gpu.uuid, gpu.nvlink_peers) for gpu in gpus]
    on(report(ranks, ModelProbe("bfloat16", [2, 2], [GIB, GIB]), gpus), machine(), (2, ""))
    findings = look(served(model))
    lines = as_table(findings).splitlines()
    for line in (
        "ok  driver         580.95.05, CUDA 13.0",
        "ok  cuda:0         A GPU, 80.0 GiB, NVLink to cuda:1",
        "ok  cuda:0         stream memory operations work (tried)",
        "-   cuda:1         cuStreamWaitValue64: not supported",
        "ok  transport      copy_engine: the best that every rank offers",
    ):
        assert line in lines
    assert obstacles(findings) == []


@pytest.mark.parametrize(
    ("options", "ranks", "found", "machine_fields", "obstacle"),
    [
        ({"pipeline_parallel_size": 5}, [CPU_RANK] * 5, None, {}, "--pipeline-parallel-size 5: must be between 1 and"),
        ({"max_model_len": 300}, [CPU_RANK] * 2, None, {}, "--max-model-len 300: must be at most the model's context, 256"),
        ({"device": "cuda"}, [], None, {}, "--device cuda: needs a GPU, but no GPU"),
        ({"pp_transport": "copy_engine"}, [CPU_RANK] * 2, None, {}, "--pp-transport copy_engine: rank 0: computes on a CPU"),
        ({}, [CPU_RANK] * 2, ModelProbe(obstacle="model type x: no"), {}, "model type x: no"),
        ({}, [RankProbe({}, "", [], "no kernel image")] * 2, None, {}, "no kernel image"),
        ({}, [CPU_RANK] * 2, None, {"max_open_files": 256}, "ulimit -n is 256: must be at least 384"),
        (
            {"kv_cache_memory_bytes": 20 * GIB},
            [CPU_RANK] * 2,
            ModelProbe("float32", [2, 2], [GIB, GIB]),
            {},
            "2 ranks need 42.0 GiB, the memory available is 32.0 GiB",
        ),
    ],
)
def test_what_cannot(
    on: Callable[..., list[ProbeRequest]],
    model: str,
    options: dict[str, object],
    ranks: list[RankProbe],
    found: ModelProbe | None,
    machine_fields: dict[str, object],
    obstacle: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on(report(ranks, found), machine(**machine_fields))
    config = served(model, **options)
    [told] = obstacles(look(config))
    assert told.startswith(obstacle)
    with pytest.raises(StagewireError, match=r"^cannot be served here: ") as caught:
        check(config)
    assert told in str(caught.value)
    assert "NO " in capsys.readouterr().out


def test_a_port_that_is_taken(on: Callable[..., list[ProbeRequest]], model: str) -> None:
    on(report([CPU_RANK] * 2), machine())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = obstacles(look(ServeConfig(model=model, load_format="dummy", port=port)))
    assert told == [f"--port {port}: must be free on 127.0.0.1 (Address already in use)"]


def test_a_model_that_is_not_there(on: Callable[..., list[ProbeRequest]]) -> None:
    requests = on(report([CPU_RANK] * 2), machine())
    assert obstacles(look(served("/nonexistent"))) == [
        "--model /nonexistent: no such file or directory (models are not downloaded)"
    ]
    assert requests[0].model_path == ""


def test_links_that_cannot_be_made(on: Callable[..., list[ProbeRequest]], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(1, "Operation not permitted")

    on(report([CPU_RANK] * 2), machine())
    monkeypatch.setattr(checking, "create_shared_links", refuse)
    assert obstacles(look(served(model))) == ["shared_memory: its links cannot be made: Operation not permitted"]


def test_this_machine_as_a_user_sees_it(model: str) -> None:
    command = [sys.executable, "-m", "orchestrator", "check", "--load-format", "dummy", "--port", "0", "--device", "cpu", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights of each rank: 2 layers" in done.stdout


def test_the_process_that_is_asked_loads_no_torch(model: str) -> None:
    script = (
        "import sys; from orchestrator import check; check.run_probe = lambda *_: exec('raise check.StagewireError(1)');"
        f"check.look(check.ServeConfig(model={model!r}, load_format='dummy', port=0));"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


class TestMachine:
    def test_reads_what_the_kernel_shows(self, tmp_path: Path) -> None:
        files = {
            "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n",
            "proc/meminfo": "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\nGCC version: 12\n",
            "sys/fs/cgroup/memory.max": "512000\n",
            "sys/fs/cgroup/memory.current": "112000\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            **{f"sys/devices/system/node/node{i}/cpulist": f"{i}\n" for i in (0, 10, 2)},
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        found = read_machine(tmp_path)
        assert found.cpu_model == "Some CPU @ 2 GHz"
        assert (found.total_bytes, found.available_bytes, found.memory_limit_bytes) == (1024000, 400000, 512000)
        assert found.cpu_quota == 1.5
        assert found.numa_nodes == ["0", "2", "10"]
        assert found.gpu_module == "580.95.05"

    def test_a_control_group_without_limits(self, tmp_path: Path) -> None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
        found = read_machine(tmp_path)
        assert (found.memory_limit_bytes, found.cpu_quota, found.gpu_module, found.numa_nodes) == (None, None, "", [])

    def test_this_one(self) -> None:
        found = read_machine()
        assert 0 < found.available_bytes <= found.total_bytes
        assert 0 < found.num_usable_cpus <= found.num_cpus
