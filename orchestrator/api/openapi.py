"""GET /openapi.json and /docs: the routes for programs and for people."""

import html
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from orchestrator import __version__
from orchestrator.api import schema
from orchestrator.api.errors import ErrorBody
from orchestrator.api.responses import json_response

_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"


class _Operation(NamedTuple):
    """``body`` and ``answer`` are msgspec types, None where there is none or it is any object."""

    method: str
    path: str
    summary: str
    answer: type | None = None
    body: type | None = None
    errors: tuple[int, ...] = ()
    is_open: bool = False  # needs no API key


_GENERATION_ERRORS = (400, 404, 413, 415, 429, 500, 503)
_TOKEN_ERRORS = (400, 404, 413, 415, 503)

_OPERATIONS = (
    _Operation("post", "/v1/completions", "Continue prompts", schema.Completion, schema.CompletionRequest, _GENERATION_ERRORS),
    _Operation(
        "post", "/v1/chat/completions", "Answer messages", schema.ChatCompletion, schema.ChatRequest, _GENERATION_ERRORS
    ),
    _Operation("get", "/v1/models", "The model that is served, as a list", schema.ModelList, None, (503,)),
    _Operation("get", "/v1/models/{model}", "One model", schema.ModelCard, None, (404, 503)),
    _Operation(
        "post", "/tokenize", "The token ids of a prompt or of messages", schema.Tokens, schema.TokenizeRequest, _TOKEN_ERRORS
    ),
    _Operation("post", "/detokenize", "The text of token ids", schema.Detokenized, schema.DetokenizeRequest, _TOKEN_ERRORS),
    _Operation("get", "/load", "How many requests there are", schema.Load),
    _Operation("get", "/server_info", "The config, without its secrets, and what is served"),
    _Operation("get", "/version", "The version"),
    _Operation("get", "/livez", "200 while the process lives", is_open=True),
    _Operation("post", "/ping", "As GET", is_open=True),
    *(
        _Operation("get", path, "200 while requests are admitted, else 503 and why not", is_open=True)
        for path in ("/readyz", "/health", "/ping")
    ),
)


def openapi() -> dict[str, Any]:
    """The document, as OpenAPI 3.1 has it."""
    types = {found for one in _OPERATIONS for found in (one.answer, one.body) if found is not None} | {ErrorBody}
    _, components = msgspec.json.schema_components(sorted(types, key=lambda found: found.__name__), ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stagewire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: _Operation) -> dict[str, Any]:
    answer = {"type": "object"} if operation.answer is None else _reference(operation.answer)
    content: dict[str, Any] = {_JSON: {"schema": answer}}
    if operation.path.endswith("/completions"):
        content["text/event-stream"] = {"schema": {"type": "string", "description": "with stream: an event for each piece"}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in (*operation.errors, *(() if operation.is_open else (401,))):
        responses[str(status)] = {"description": "an error", "content": {_JSON: {"schema": _reference(ErrorBody)}}}
    if operation.is_open and operation.path != "/livez":
        responses["503"] = {"description": "why not", "content": {_JSON: {"schema": {"type": "object"}}}}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if not operation.is_open:
        described["security"] = [{}, {"key": []}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(operation.body)}}}
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return described


def _reference(found: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=found.__name__)}


def _page() -> str:
    """One page that loads nothing else, so that it is there without a network."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Stagewire API</title>",
        "<style>body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}code{font-family:monospace}"
        "td{padding:.1em 1em .1em 0;vertical-align:top}</style>",
        f"<h1>Stagewire {html.escape(__version__)}</h1><p>For programs: <a href=openapi.json>openapi.json</a></p>",
    ]
    for operation in _OPERATIONS:
        title = f"{operation.method.upper()} {operation.path}"
        parts.append(f"<h2><code>{html.escape(title)}</code></h2><p>{html.escape(operation.summary)}</p>")
        if operation.body is not None:
            rows = "".join(
                f"<tr><td><code>{html.escape(field.name)}</code><td><code>{html.escape(_type_name(field.type))}</code>"
                for field in msgspec.structs.fields(operation.body)
            )
            parts.append(f"<table>{rows}</table>")
    return "".join(parts)


def _type_name(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else str(found).replace("typing.", "")


class Documents:
    """Both are written once, when the server is built."""

    def __init__(self) -> None:
        self._openapi = openapi()
        self._page = _page()

    async def openapi(self, request: Request) -> Response:
        return json_response(self._openapi)

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(self._page)
