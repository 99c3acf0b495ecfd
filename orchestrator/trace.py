"""``stagewire trace``: saves a timeline of a running worker, to be opened in ui.perfetto.dev."""

import http.client
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO

from stages.errors import ConfigError, StagewireError

TIMEOUT_SECONDS = 30.0  # between two pieces of the answer


def save_trace(url: str, seconds: float, path: Path) -> int:
    """Save the last ``seconds`` of the worker whose metrics are at ``url``, any path of it, as ``path``; returns the bytes.

    ``path`` holds the whole timeline afterwards or, when this raises a ``StagewireError``, what it held before.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.netloc:
        raise ConfigError(f"--url {url}: must be the address of a worker's metrics, such as http://127.0.0.1:8001")
    address = f"http://{parts.netloc}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this host's 127.0.0.1
    try:
        with opener.open(f"{address}/trace?seconds={seconds:g}", timeout=TIMEOUT_SECONDS) as answer:
            if answer.headers.get_content_type() != "application/json":
                raise StagewireError(f"--url {address}: what answers there is no exporter of Stagewire's metrics")
            return _write(answer, path)
    except urllib.error.HTTPError as exc:
        said = exc.read(200).decode(errors="replace").strip() if exc.code == 400 else ""
        raise StagewireError(said or f"--url {address}: no exporter of Stagewire's metrics (it answers {exc.code})") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise StagewireError(
            f"--url {address}: no whole answer ({text}); the worker prints the address of its metrics"
        ) from None


def _write(answer: IO[bytes], path: Path) -> int:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            shutil.copyfileobj(answer, file)
            num_bytes = file.tell()
        part.replace(path)
    except OSError as exc:
        if exc.filename is None:
            raise  # of the connection
        raise ConfigError(f"-o {path}: must be a file that can be written ({exc.strerror})") from None
    finally:
        with suppress(OSError):
            part.unlink()
    return num_bytes
