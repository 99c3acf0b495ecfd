"""Routes for those who watch the server, and what it says of its model."""

from starlette.requests import Request
from starlette.responses import Response

from orchestrator import __version__
from orchestrator.api.endpoint import Service
from orchestrator.api.errors import ApiError
from orchestrator.api.relay import MetricsRelay
from orchestrator.api.responses import json_response
from orchestrator.api.schema import Load, ModelCard, ModelList
from orchestrator.config import redacted
from orchestrator.request import EngineState, NotReady


class Probes:
    def __init__(self, service: Service, relay: MetricsRelay) -> None:
        self._service = service
        self._relay = relay

    async def livez(self, request: Request) -> Response:
        """200 while the process lives."""
        return json_response({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 while requests are admitted, else 503 and why not."""
        state = self._service.engine.state
        if state is EngineState.READY:
            return json_response({"status": state})
        headers = {"retry-after": str(NotReady.retry_after_seconds)}
        return json_response({"status": state, "reason": f"the server is {state}"}, 503, headers)

    async def load(self, request: Request) -> Response:
        engine = self._service.engine
        running, waiting = engine.num_running, engine.num_waiting
        return json_response(Load(num_running=running, num_waiting=waiting, server_load=running + waiting))

    async def server_info(self, request: Request) -> Response:
        """The config, without its secrets, and what is served."""
        service = self._service
        model = service.engine.served_model
        served = None
        if model is not None:
            served = {"name": model.name, "max_model_len": model.max_model_len, "vocab_size": model.vocab_size}
        info = {"version": __version__, "state": service.engine.state, "model": served, "config": redacted(service.config)}
        return json_response(info)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """What the exporter says of the engine and of every rank."""
        return await self._relay.get(request.headers)

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        card = self._card()
        name: str = request.path_params["name"]
        if name != card.id:
            raise ApiError(404, f"model {name[:100]}: not served here; this server has {card.id}", code="model_not_found")
        return json_response(card)

    def _card(self) -> ModelCard:
        model = self._service.engine.served_model
        if model is None:
            raise NotReady(f"the server is {self._service.engine.state}")
        return ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=model.max_model_len)
