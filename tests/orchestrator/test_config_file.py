from pathlib import Path

import pytest

from orchestrator.config import OPTIONS, ServeConfig, load_config, resolve_config
from stages.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.yaml"


def load(path: Path, text: str | bytes) -> ServeConfig:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config({}, {}, str(path))


def test_every_option_can_be_set(path: Path) -> None:
    values = {
        "load_format": "dummy", "dtype": "bfloat16", "pp_transport": "memory", "cpu_binding": "none", "device": "cpu",
        "log_level": "debug", "layer_split": "[1, 2]", "host": "::1", "model": "~/m", "served_model_name": "1e3",
    }  # fmt: skip
    lines = [f"{option.field}: {values.get(option.field, '2')}" for option in OPTIONS]
    config = load(path, "\n".join(lines))
    different = [option.field for option in OPTIONS if getattr(config, option.field) != option.default]
    assert len(different) == len(OPTIONS) - 1
    assert config.pipeline_parallel_size == 2
    assert (config.layer_split, config.model, config.served_model_name, config.host) == ((1, 2), "~/m", "1e3", "::1")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("port: 010", "port", 10),
        ("kv_cache_memory_bytes: 2G", "kv_cache_memory_bytes", 2 * 2**30),
        ("model: off", "model", "off"),
        ("model: 'null'", "model", "null"),
        ("model: null", "model", None),
        ("max_model_len:", "max_model_len", None),
        ("layer_split: 1, 2", "layer_split", (1, 2)),
        ("layer_split:\n- 1\n- 2", "layer_split", (1, 2)),
        ("device: [cpu, 'cuda:1']", "device", "cpu,cuda:1"),
        ("a: &a 7\n", "", None),
        ("shutdown_timeout: 1.5", "shutdown_timeout", 1.5),
        ("# nothing\n", "port", 8000),
        ("", "port", 8000),
        ("{\"port\": 1}", "port", 1),
    ],
)  # fmt: skip
def test_values_are_read_as_they_are_written(path: Path, text: str, field: str, value: object) -> None:
    if not field:
        with pytest.raises(ConfigError, match="unknown option a"):
            load(path, text)
        return
    assert getattr(load(path, text), field) == value


def test_flag_over_variable_over_file_over_default(path: Path) -> None:
    path.write_text("port: 1\nmax_queue: 2\nring_slots: 4\n")
    environ = {"STAGEWIRE_PORT": "10", "STAGEWIRE_MAX_QUEUE": "20", "STAGEWIRE_CONFIG": str(path)}
    resolved = resolve_config({"port": "100"}, environ)
    config = resolved.config
    assert (config.port, config.max_queue, config.ring_slots, config.block_size) == (100, 20, 4, 16)
    sources = [resolved.sources[field] for field in ("port", "max_queue", "ring_slots", "block_size")]
    assert sources == ["--port", "STAGEWIRE_MAX_QUEUE", f"{path}:3: ring_slots", "default"]


def test_the_flag_names_the_file_before_the_variable(path: Path) -> None:
    path.write_text("port: 1\n")
    assert load_config({}, {"STAGEWIRE_CONFIG": "/nonexistent"}, str(path)).port == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 8000\nprot: 1", "{path}:2: unknown option prot; did you mean port?"),
        ("max-num-seqs: 1", "{path}:1: unknown option max-num-seqs; did you mean max_num_seqs?"),
        ("--port: 1", "{path}:1: unknown option --port; did you mean port?"),
        ("config: x", "{path}:1: unknown option config"),
        ("port: 1\nport: 2", "{path}:2: port: must be given once, is also in {path}:1"),
        ("port: eighty", "{path}:1: port eighty: must be a whole number between 0 and 65535"),
        ("port: 8000.0", "{path}:1: port 8000.0: must be a whole number between 0 and 65535"),
        ("port: true", "{path}:1: port true: must be a whole number between 0 and 65535"),
        ("port: null", "{path}:1: port null: must be a whole number between 0 and 65535"),
        ("port: [8000]", "{path}:1: port [...]: must be a whole number between 0 and 65535"),
        ("port: {a: 1}", "{path}:1: port: must be a single value or a list of single values"),
        ("layer_split: [[1], 2]", "{path}:1: layer_split: must be a single value or a list of single values"),
        ("layer_split: [1, 2, 3]", "{path}:1: layer_split 1,2,3: must have one part per stage (2), has 3"),
        ("dtype: fp8", "{path}:1: dtype fp8: must be one of auto, float32, bfloat16, float16"),
        ("- port: 1", "{path}:1: must be a mapping of options, as `port: 8000`"),
        ("port", "{path}:1: must be a mapping of options, as `port: 8000`"),
        ("? [a]\n: 1", "{path}:1: an option's name must be plain text"),
        ("port: 1\n  x: 2", "{path}:2: is not valid YAML: mapping values are not allowed here"),
        ("port: *nowhere", "{path}:1: is not valid YAML: found undefined alias 'nowhere'"),
        ("port: 1\n---\nport: 2", "{path}:2: is not valid YAML: but found another document"),
        (b"port: \xff", "{path}: is not valid YAML: "),
        (b"port: 1" + b" " * 2**20, "--config {path}: must have at most 1048576 bytes"),
    ],
)
def test_errors_name_the_place_and_the_rule(path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, text)
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_a_tag_builds_no_object(path: Path) -> None:
    with pytest.raises(ConfigError, match=r":1: port: must be a single value"):
        load(path, "port: !!python/object/apply:os.system {args: [exit]}")


@pytest.mark.parametrize(("given", "environ"), [("/nonexistent", {}), (None, {"STAGEWIRE_CONFIG": "/nonexistent"})])
def test_a_file_that_is_not_there(given: str | None, environ: dict[str, str]) -> None:
    named_by = "STAGEWIRE_CONFIG" if given is None else "--config"
    with pytest.raises(ConfigError, match=f"^{named_by} /nonexistent: cannot be read: No such file or directory$"):
        load_config({}, environ, given)


def test_an_empty_name() -> None:
    with pytest.raises(ConfigError, match=r"^STAGEWIRE_CONFIG \(empty\): must be non-empty printable text$"):
        load_config({}, {"STAGEWIRE_CONFIG": ""})
