"""What the process that loads torch finds out for ``stagewire check``."""

from pathlib import Path

import pytest

from stages.errors import CudaError
from stages.probe import ModelProbe, ProbeRequest
from stages.probe_main import probe, probe_gpus, probe_model
from tests.emulated_cuda import emulation
from tests.stages.model_factory import tiny_config


def request(path: Path | None = None, **fields: object) -> ProbeRequest:
    values: dict[str, object] = {
        "devices": ["cpu", "cpu"], "model_path": str(path or ""), "load_format": "dummy", "dtype": "float32", "layer_split": [],
        "max_model_len": 0,
    }  # fmt: skip
    return ProbeRequest(**{**values, **fields})  # type: ignore[arg-type]


def write_config(directory: Path, family: str = "llama", **overrides: object) -> Path:
    tiny_config(family, **overrides).save_pretrained(directory)
    return directory


def test_a_machine_without_a_gpu() -> None:
    report = probe(request(devices=["cpu"]), CudaError("the CUDA driver cannot be loaded"))
    assert report.gpus == []
    assert report.gpu_obstacle == "the CUDA driver cannot be loaded"
    assert report.driver_version == 0
    assert report.model is None
    [rank] = report.ranks
    assert rank.obstacle == ""
    assert rank.transports["memory"] == ""
    assert rank.transports["copy_engine"] == "computes on a CPU"


def test_a_rank_on_a_gpu_that_torch_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = probe(request(devices=["cuda:0", "cpu"]), CudaError("no"))
    assert [rank.obstacle.startswith("--device cuda:0: this torch") for rank in report.ranks] == [True, False]


def test_gpus_are_tried() -> None:
    with emulation() as emulated:
        first, *others = probe_gpus(emulated.driver)
        assert first.memory_operations == ""
        assert first.nvlink_peers == [gpu.uuid for gpu in others]
        emulated.take_memory_operations()
        emulated.take_peers()
        first, *_ = probe_gpus(emulated.driver)
        assert first.memory_operations.startswith("stream memory operations do not work: ")
        assert first.nvlink_peers == []


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    from stages.driver import Driver

    report = probe(request(devices=["cuda:0"]), Driver())
    assert report.gpus[0].memory_operations == ""
    assert report.ranks[0].obstacle == ""
    assert report.ranks[0].device_uuid == report.gpus[0].uuid
    assert report.ranks[0].transports["copy_engine"] == ""


def test_a_model(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    found = probe_model(request(tmp_path, layer_split=[1, 3]))
    assert (found.dtype, found.layer_split, found.obstacle) == ("float32", [1, 3], "")
    embedding = 512 * 64 * 4
    layer = (found.slice_bytes[0] - embedding, (found.slice_bytes[1] - embedding - 64 * 4) / 3)
    assert layer[0] == layer[1]


@pytest.mark.parametrize(
    ("family", "overrides", "fields", "obstacle"),
    [
        ("gpt2", {}, {}, "model type gpt2: "),
        ("llama", {}, {"layer_split": [1, 1]}, "--layer-split 1,1: adds up to 2"),
        ("mistral", {"sliding_window": 64}, {}, "model type mistral: has a sliding window of 64 tokens"),
    ],
)
def test_a_model_that_cannot_be_served(
    tmp_path: Path, family: str, overrides: dict[str, object], fields: dict[str, object], obstacle: str
) -> None:
    write_config(tmp_path, family, **overrides)
    found = probe_model(request(tmp_path, **fields))
    assert found.obstacle.startswith(obstacle)
    assert found == ModelProbe(obstacle=found.obstacle)
