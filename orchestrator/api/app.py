"""The HTTP application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from metrics.engine import EngineMetrics
from orchestrator.api.api_key import ApiKeyMiddleware, read_api_keys
from orchestrator.api.body import ClientGone
from orchestrator.api.chat import Chat
from orchestrator.api.completions import Completions
from orchestrator.api.endpoint import GenerationEndpoint, Service, TokenizerProvider
from orchestrator.api.engine_client import EngineClient
from orchestrator.api.errors import ApiError, to_api_error
from orchestrator.api.openapi import Documents
from orchestrator.api.probes import Probes
from orchestrator.api.relay import Address, MetricsRelay
from orchestrator.api.request_id import RequestIdMiddleware
from orchestrator.api.responses import error_response
from orchestrator.api.token_routes import TokenRoutes
from orchestrator.config import ServeConfig
from stages.errors import StagewireError

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_HTTP_MESSAGES = {
    404: "unknown path; this server has POST /v1/completions, POST /v1/chat/completions and GET /v1/models",
    405: "method not allowed on this path",
}


def create_app(
    engine: EngineClient, tokenizer_provider: TokenizerProvider, config: ServeConfig, metrics: EngineMetrics, exporter: Address
) -> Starlette:
    """The application. It can be served before the engine is ready: ``tokenizer_provider`` gives None until then.

    ``exporter``: where the exporter of the metrics listens.
    """
    service = Service(engine=engine, tokenizer_provider=tokenizer_provider, config=config, metrics=metrics)
    probes = Probes(service, MetricsRelay(exporter))
    tokens = TokenRoutes(service)
    documents = Documents()
    app = Starlette(
        routes=[
            Route("/v1/completions", GenerationEndpoint(service, Completions()), methods=["POST"]),
            Route("/v1/chat/completions", GenerationEndpoint(service, Chat()), methods=["POST"]),
            Route("/v1/models", probes.models),
            Route("/v1/models/{name:path}", probes.model),
            Route("/health", probes.readyz),
            Route("/readyz", probes.readyz),
            Route("/livez", probes.livez),
            Route("/ping", probes.readyz, methods=["GET", "POST"]),
            Route("/version", probes.version),
            Route("/load", probes.load),
            Route("/server_info", probes.server_info),
            Route("/openapi.json", documents.openapi),
            Route("/docs", documents.docs),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/metrics", probes.metrics),
        ],
        middleware=[Middleware(RequestIdMiddleware), Middleware(ApiKeyMiddleware, keys=read_api_keys(config))],
        exception_handlers={
            HTTPException: _on_http_exception,
            ApiError: _on_exception,
            ClientGone: _on_client_gone,
            StagewireError: _on_exception,
            Exception: _on_exception,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _on_client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _on_exception(request: Request, exc: Exception) -> Response:
    return error_response(to_api_error(exc))


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message = _HTTP_MESSAGES.get(exc.status_code, exc.detail)
    code = _HTTP_CODES.get(exc.status_code, "http_error")
    return error_response(ApiError(exc.status_code, message, code=code, headers=exc.headers))
