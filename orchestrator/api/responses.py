"""Responses whose body is encoded by msgspec."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from orchestrator.api.errors import ApiError

_encoder = msgspec.json.Encoder()


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoder.encode(body), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)
