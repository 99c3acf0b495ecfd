"""``stagewire health``: asks a worker of this host whether it admits requests. Quick: no server, no loop, standard library."""

import http.client
import json
from typing import Any, cast

from stages.errors import StagewireError

TIMEOUT_SECONDS = 2.0  # /readyz answers from memory; a loop that takes longer is not healthy

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # a worker that listens everywhere is asked on loopback


def check_health(host: str, port: int) -> str:
    """The state of the worker that listens on ``host`` and ``port``; ``StagewireError`` unless it is ready."""
    connection = http.client.HTTPConnection(_ANY_ADDRESS.get(host, host), port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as exc:
        raise StagewireError(f"no answer from http://{host}:{port}/readyz: {exc or type(exc).__name__}") from None
    finally:
        connection.close()
    state = _state(body)
    if response.status != 200:
        raise StagewireError(f"http://{host}:{port}/readyz says {response.status} {state}")
    return state


def _state(body: bytes) -> str:
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return "(no JSON)"
    return str(cast("dict[str, Any]", answer).get("status")) if isinstance(answer, dict) else "(no object)"
