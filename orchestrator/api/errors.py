"""The error object of the OpenAI API, and which of our exceptions becomes which."""

import logging
import re
from collections.abc import Mapping

import msgspec

from orchestrator.request import NotReady, QueueFull, ShutDown
from stages.errors import ConfigError, StageFailed

_logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500  # a message never grows with the request

# What ConfigErrors begin with: "field value: rule" or "field: rule".
_FIELD = re.compile(r"([a-z][\w.\[\]]*)(?: \S+)?:")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A request ends with this status and error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(ErrorDetail(message[:_MAX_MESSAGE_CHARS], type, param, code))
        self.headers = dict(headers or {})

    @property
    def code(self) -> str | None:
        return self.body.error.code


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 for a field whose value breaks a rule; ``message`` names both."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that is understood, would change the output, and is not supported."""
    return invalid(f"{param}: {message}", param, "unsupported_parameter")


def to_api_error(exc: Exception) -> ApiError:
    """What a client is told of ``exc``. One that nobody expected is logged, and told without its text."""
    match exc:
        case ApiError():
            return exc
        case QueueFull():
            headers = {"retry-after": str(exc.retry_after_seconds)}
            return ApiError(429, str(exc), code="queue_full", type="rate_limit_error", headers=headers)
        case NotReady():
            headers = {"retry-after": str(exc.retry_after_seconds)}
            return ApiError(503, str(exc), code="not_ready", type="server_error", headers=headers)
        case ShutDown():
            headers = {"retry-after": str(exc.retry_after_seconds)}
            return ApiError(503, str(exc), code="shut_down", type="server_error", headers=headers)
        case ConfigError():
            field = _FIELD.match(str(exc))
            return invalid(str(exc), field[1] if field else None)
        case StageFailed():
            return ApiError(500, str(exc), code="stage_failed", type="server_error")
        case _:
            _logger.error("unexpected error in a request", exc_info=exc)
            return ApiError(500, "internal error", code="internal_error", type="server_error")
