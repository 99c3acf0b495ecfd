"""Who may ask: with API keys configured, every route but the probes and the metrics wants one of them."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.api.errors import ApiError
from orchestrator.api.responses import error_response
from orchestrator.config import HttpOptions
from stages.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/metrics"})  # for those who watch the server


class ApiKeyMiddleware:
    """Answers 401 to what does not bear one of ``keys``; without keys it lets everything through."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key must be given, as the header Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", type="authentication_error", headers=headers)
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Digests have one length, and all are compared: the time says neither how much of a key is right nor which one.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def read_api_keys(config: HttpOptions) -> tuple[str, ...]:
    """The keys of ``--api-key`` and ``--api-key-file``; ``ConfigError`` when the file cannot be read or has no key."""
    keys = config.api_key or ()
    if config.api_key_file is None:
        return keys
    named = f"--api-key-file {config.api_key_file}"
    try:
        in_file = Path(config.api_key_file).read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else "it has other characters"
        raise ConfigError(f"{named}: must be a file of keys in ASCII ({cause})") from None
    found = tuple(key.strip() for key in in_file if key.strip())
    if not found or not all(key.isprintable() and " " not in key for key in found):
        raise ConfigError(f"{named}: must have a key on each line, of printable characters without spaces")
    return (*keys, *found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
