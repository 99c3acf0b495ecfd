import dataclasses

import pytest

from orchestrator.config import OPTIONS, HttpOptions, SchedulerOptions, ServeConfig, load_config, resolve_config, suggestion
from orchestrator.show_config import as_json, as_table, as_yaml
from stages.errors import ConfigError


def test_defaults() -> None:
    config = load_config({}, {})
    assert config == ServeConfig()
    expected = {
        "model": None, "load_format": "auto", "dtype": "auto", "pipeline_parallel_size": 2, "layer_split": None,
        "pp_transport": "auto", "ring_slots": 3, "max_model_len": None, "max_num_seqs": 64, "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": None, "block_size": 16, "max_queue": 256, "host": "127.0.0.1", "port": 8000,
        "api_key": None, "api_key_file": None,
        "shutdown_timeout": 30.0, "start_timeout": 300.0, "log_level": "info",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_field_is_an_option_once() -> None:
    assert sorted(option.field for option in OPTIONS) == sorted(field.name for field in dataclasses.fields(ServeConfig))
    for option in OPTIONS:
        assert option.flag == "--" + option.field.replace("_", "-")
        assert option.variable == "STAGEWIRE_" + option.field.upper()
        assert option.help


def test_a_room_takes_its_part() -> None:
    config = ServeConfig(port=1, max_num_seqs=2)
    assert isinstance(config, HttpOptions)
    assert isinstance(config, SchedulerOptions)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 3  # type: ignore[misc]


def test_flag_wins_over_variable_wins_over_default() -> None:
    environ = {"STAGEWIRE_PORT": "9000", "STAGEWIRE_MAX_QUEUE": "7", "HOME": "/"}
    config = load_config({"port": "9001"}, environ)
    assert (config.port, config.max_queue, config.ring_slots) == (9001, 7, 3)


def test_a_bad_variable_does_not_matter_under_a_flag() -> None:
    assert load_config({"port": "9001"}, {"STAGEWIRE_PORT": "x"}).port == 9001


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("kv_cache_memory_bytes", "512M", 512 * 2**20),
        ("kv_cache_memory_bytes", "2G", 2 * 2**30),
        ("kv_cache_memory_bytes", "2gib", 2 * 2**30),
        ("kv_cache_memory_bytes", "1.5k", 1536),
        ("kv_cache_memory_bytes", "4096", 4096),
        ("layer_split", "16,14", (16, 14)),
        ("layer_split", " 1 , 2 ", (1, 2)),
        ("log_level", "DEBUG", "debug"),
        ("port", "0", 0),
    ],
)
def test_values(field: str, text: str, value: object) -> None:
    assert getattr(load_config({field: text}, {}), field) == value


BAD = [
    ("pipeline_parallel_size", "0", "a whole number between 1 and 1024"),
    ("pipeline_parallel_size", "two", "a whole number between 1 and 1024"),
    ("pipeline_parallel_size", "1_0", "a whole number between 1 and 1024"),
    ("pipeline_parallel_size", "9" * 5000, "a whole number between 1 and 1024"),
    ("layer_split", "16,0", "layer counts of at least 1"),
    ("layer_split", "16,", "layer counts of at least 1"),
    ("layer_split", "", "layer counts of at least 1"),
    ("device", "gpu", "auto, cpu, cuda, or a list"),
    ("device", "cuda:0,cuda:x", "auto, cpu, cuda, or a list"),
    ("spin_us", "-1", "a whole number between 0 and 10000000"),
    ("step_timeout", "0", "a number of seconds above 0"),
    ("pp_transport", "nvlink", "one of auto, copy_engine, nccl, shared_memory, gloo, memory"),
    ("load_format", "gguf", "one of auto, dummy"),
    ("dtype", "fp8", "one of auto, float32, bfloat16, float16"),
    ("ring_slots", "0", "a whole number between 1 and 64"),
    ("max_model_len", "1", "a whole number, at least 2"),
    ("max_num_seqs", "0", "a whole number between 1"),
    ("max_num_batched_tokens", "-1", "a whole number between 1"),
    ("kv_cache_memory_bytes", "2X", "a number of bytes above 0"),
    ("kv_cache_memory_bytes", "0", "a number of bytes above 0"),
    ("kv_cache_memory_bytes", "1.5", "a number of bytes above 0"),
    ("block_size", "0", "a whole number between 1"),
    ("max_queue", "0", "a whole number, at least 1"),
    ("port", "65536", "a whole number between 0 and 65535"),
    ("host", "", "non-empty printable text"),
    ("model", "a\nb", "non-empty printable text"),
    ("shutdown_timeout", "0", "a number of seconds above 0"),
    ("start_timeout", "nan", "a number of seconds above 0"),
    ("start_timeout", "inf", "a number of seconds above 0"),
    ("threads_per_rank", "0", "a whole number between 1"),
    ("log_level", "loud", "one of debug, info, warning, error"),
]


@pytest.mark.parametrize(("field", "text", "rule"), BAD)
def test_bad_values_name_their_source_and_rule_in_one_line(field: str, text: str, rule: str) -> None:
    [option] = [option for option in OPTIONS if option.field == field]
    for source, given, environ in ((option.flag, {field: text}, {}), (option.variable, {}, {option.variable: text})):
        with pytest.raises(ConfigError) as caught:
            load_config(given, environ)
        message = str(caught.value)
        assert message.startswith(f"{source} {text[:20] if text.isprintable() else ''}")
        assert f": must be {rule}" in message
        assert "\n" not in message
        assert len(message) < 400


def test_values_given_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 0: must be"):
        ServeConfig(max_num_seqs=0)


def test_split_must_have_a_part_per_stage() -> None:
    message = r" 16,13,1: must have one part per stage \(2\), has 3"
    with pytest.raises(ConfigError, match="^--layer-split" + message):
        load_config({"layer_split": "16,13,1"}, {})
    with pytest.raises(ConfigError, match="^STAGEWIRE_LAYER_SPLIT" + message):
        load_config({}, {"STAGEWIRE_LAYER_SPLIT": "16,13,1"})
    with pytest.raises(ConfigError, match="^--layer-split" + message):
        ServeConfig(layer_split=(16, 13, 1))
    assert load_config({"layer_split": "16,13,1", "pipeline_parallel_size": "3"}, {}).layer_split == (16, 13, 1)


def test_unknown_variable() -> None:
    with pytest.raises(ConfigError, match=r"^unknown environment variable STAGEWIRE_PROT; did you mean STAGEWIRE_PORT\?$"):
        load_config({}, {"STAGEWIRE_PROT": "1"})
    with pytest.raises(ConfigError, match=r"^unknown environment variable STAGEWIRE_ZZZZZZ$"):
        load_config({}, {"STAGEWIRE_ZZZZZZ": "1"})


def test_kubernetes_service_links_are_not_ours() -> None:
    links = {
        "STAGEWIRE_SERVICE_HOST": "10.0.0.1",
        "STAGEWIRE_SERVICE_PORT": "8000",
        "STAGEWIRE_SERVICE_PORT_HTTP": "8000",
        "STAGEWIRE_PORT": "tcp://10.0.0.1:8000",
        "STAGEWIRE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "STAGEWIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load_config({}, links) == ServeConfig()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [ServeConfig().num_threads(ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert ServeConfig(threads_per_rank=5).num_threads(16) == 5


def test_suggestion() -> None:
    assert suggestion("--prot", ["--port", "--host"]) == "; did you mean --port?"
    assert suggestion("xyz", ["--port"]) == ""


def test_api_keys_are_never_shown() -> None:
    assert load_config({"api_key": "one,two"}, {}).api_key == ("one", "two")
    with pytest.raises(ConfigError) as caught:
        load_config({"api_key": "secret word"}, {})
    assert "secret" not in str(caught.value)
    resolved = resolve_config({"api_key": "one-secret"}, {})
    for shown in (as_table(resolved), as_json(resolved), as_yaml(resolved)):
        assert "one-secret" not in shown
