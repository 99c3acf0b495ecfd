"""Which device each rank computes on."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from orchestrator.config import ServeConfig
from orchestrator.devices import check_devices, choose_devices, gpus_found
from stages.errors import ConfigError, CudaError

NONE = (0, "torch 2.13.0+cpu is built without CUDA")


def test_auto_takes_gpus_when_there_is_one_for_every_rank() -> None:
    assert choose_devices("auto", 2, (2, "")) == (["cuda:0", "cuda:1"], "there is a GPU for every rank")
    assert choose_devices("auto", 3, (2, "")) == (["cpu"] * 3, "2 GPUs are too few for 3 ranks")
    assert choose_devices("auto", 1, NONE) == (["cpu"], NONE[1])


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:1,cuda:1", ["cuda:1", "cuda:1"])],
)
def test_what_is_asked_for_is_taken(wanted: str, devices: list[str]) -> None:
    assert choose_devices(wanted, 2, (2, "")) == (devices, "asked for")


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        ("cuda", NONE, "--device cuda: needs a GPU, but torch 2.13.0+cpu is built without CUDA"),
        ("cuda", (1, ""), "--device cuda: needs a GPU for each of 2 ranks, there are 1"),
        ("cuda:0", (2, ""), "--device cuda:0: must name a device for each of 2 ranks, names 1"),
        ("cuda:0,cuda:2", (2, ""), "--device cuda:0,cuda:2: there is no cuda:2, the GPUs are cuda:0 to cuda:1"),
    ],
)
def test_what_is_impossible_names_the_option_and_the_rule(wanted: str, found: tuple[int, str], message: str) -> None:
    with pytest.raises(ConfigError) as info:
        choose_devices(wanted, 2, found)
    assert str(info.value).startswith(message)


def test_memory_is_for_ranks_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="--pp-transport memory: must be used with --device cpu"):
        check_devices(ServeConfig(pp_transport="memory"), ["cuda:0", "cuda:0"])


# ---- what there is ----------------------------------------------------------------------------------------------------


def install_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, libraries: list[str]) -> None:
    (folder / "lib").mkdir()
    for name in libraries:
        (folder / "lib" / name).touch()
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)


class FakeDriver:
    num_gpus = 0

    def device_count(self) -> int:
        return self.num_gpus


def test_a_torch_without_cuda_uses_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("orchestrator.devices.Driver", None)  # not even asked
    install_torch(monkeypatch, tmp_path, ["libtorch_cpu.so"])
    num_gpus, reason = gpus_found()
    assert num_gpus == 0
    assert reason.startswith("torch ")
    assert reason.endswith(" is built without CUDA")


@pytest.mark.parametrize(("num_gpus", "reason"), [(0, "the CUDA driver lists no GPU"), (2, "")])
def test_the_driver_counts_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: int, reason: str) -> None:
    monkeypatch.setattr("orchestrator.devices.Driver", FakeDriver)
    monkeypatch.setattr(FakeDriver, "num_gpus", num_gpus)
    install_torch(monkeypatch, tmp_path, ["libtorch_cpu.so", "libtorch_cuda.so"])
    assert gpus_found() == (num_gpus, reason)


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_driver() -> None:
        raise CudaError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("orchestrator.devices.Driver", no_driver)
    install_torch(monkeypatch, tmp_path, ["libtorch_cuda.so"])
    assert gpus_found() == (0, "libcuda.so.1: cannot open shared object file")


def test_looking_for_gpus_loads_no_torch() -> None:
    program = "import sys; from orchestrator.devices import gpus_found; gpus_found(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
