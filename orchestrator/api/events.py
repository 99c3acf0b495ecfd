"""Server-sent events."""

import msgspec

from orchestrator.api.errors import ApiError

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
)
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(body: object) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


def error_events(error: ApiError) -> bytes:
    """The end of a stream that broke: clients take a stream that just ends for a complete one."""
    return event(error.body) + DONE
