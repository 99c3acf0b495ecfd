"""Convert a GGUF file to a Hugging Face directory: ``python -m stages.model.convert SRC.gguf DST_DIR``.

The tensors are stored dequantised in float32, which alone holds a quantised value (scale times integer plus offset) exactly;
a lower ``--dtype`` rounds once, while loading. ``DST_DIR`` appears whole or not at all. Of several converters of one
directory one works and the others wait for it. Exit code 0: ``DST_DIR`` is there; 2: the file cannot be converted; 1: it
could not be read or written; the last line of standard error says why.
"""

import fcntl
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.errors import ConfigError, one_line


def convert(gguf: Path, destination: Path) -> None:
    """Make ``destination`` from ``gguf`` unless it is there. ``ConfigError`` when the file cannot be converted."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _only_converter_of(destination):
        for left_behind in destination.parent.glob(f".{destination.name}.partial-*"):
            shutil.rmtree(left_behind)  # its converter was killed: it would hold the lock otherwise
        if destination.is_dir():
            return
        partial = destination.parent / f".{destination.name}.partial-{os.getpid()}"
        try:
            partial.mkdir()
            _write_directory(gguf, partial)
            _sync(partial)
            partial.rename(destination)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _only_converter_of(destination: Path) -> Iterator[None]:
    # The lock file stays: removing it would let two converters lock two files of one name.
    with (destination.parent / f".{destination.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_directory(gguf: Path, directory: Path) -> None:
    # Imported here: a converter that only waits for another one needs none of it.
    import gguf as gguf_format
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers opens the file three times, and each reader parses the whole vocabulary, for seconds.
    gguf_format.GGUFReader = functools.cache(gguf_format.GGUFReader)
    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    except OSError:
        raise
    except Exception as exc:  # the parser of a damaged file fails in any way it likes
        raise ConfigError(f"--model {gguf}: cannot be converted: {one_line(exc)}") from exc
    # What is saved is no longer quantised, and says so.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _sync(directory: Path) -> None:
    """Wait until the files are on the disk, so that a power cut cannot leave a whole directory with empty files."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main(arguments: list[str]) -> int:
    source, destination = map(Path, arguments)
    os.environ["TQDM_DISABLE"] = "1"  # progress bars would share the line of the error
    try:
        convert(source, destination)
    except (ConfigError, OSError) as exc:
        print(one_line(exc), file=sys.stderr)  # noqa: T201  this line is what the caller reads
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
