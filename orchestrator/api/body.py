"""Reading a JSON request body within a bound."""

from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from orchestrator.api.errors import ApiError, invalid

T = TypeVar("T")


class ClientGone(Exception):
    """The client went away; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. ``ApiError`` 415 when it is declared as something else than JSON, 413 when it is too large."""
    headers = Headers(scope=scope)
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"content-type {media_type[:100]}: must be application/json", code="unsupported_media_type")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:  # a chunked body declares no length
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (--max-body-bytes)", code="body_too_large")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The request in ``body``; a 400 that names the field which has the wrong type, and never repeats the input."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        problem, _, path = str(exc).replace("`", "").partition(" - at $")
        field = path.lstrip(".")
        subject = field or "the body"
        raise invalid(f"{subject}: {problem[0].lower()}{problem[1:]}", field or None, "invalid_type") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise invalid(f"the body is not valid JSON: {str(exc)[:100]}", code="invalid_json") from exc
