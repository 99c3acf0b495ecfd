"""What both generating routes do: read, check, generate, answer."""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import msgspec
from starlette.types import Receive, Scope, Send

from metrics.catalog import Metrics
from orchestrator import __version__
from orchestrator.api import events
from orchestrator.api.body import ClientGone, decode_body, read_body
from orchestrator.api.dialect import AnswerHead, Dialect, R
from orchestrator.api.disconnect import run_until_disconnect
from orchestrator.api.engine_client import EngineClient
from orchestrator.api.errors import ApiError, to_api_error
from orchestrator.api.generation import Generation
from orchestrator.api.parameters import check_model, sampling_params, stop_strings
from orchestrator.api.request_id import request_id_of
from orchestrator.api.responses import error_response, json_response
from orchestrator.api.schema import StreamOptions, refuse_unsupported
from orchestrator.config import ServeConfig
from orchestrator.request import EngineState, NotReady, ServedModel
from orchestrator.tokenizer import Tokenizer

TokenizerProvider = Callable[[], Tokenizer | None]
"""The model's tokenizer, None while it is not loaded."""

_REJECTIONS = {429: "queue_full", 503: "not_ready"}


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes share."""

    engine: EngineClient
    tokenizer_provider: TokenizerProvider
    config: ServeConfig
    metrics: Metrics

    def require_model(self) -> tuple[ServedModel, Tokenizer]:
        """``NotReady`` unless requests are admitted."""
        model, tokenizer, state = self.engine.served_model, self.tokenizer_provider(), self.engine.state
        if state is not EngineState.READY or model is None or tokenizer is None:
            raise NotReady(f"the server is {EngineState.STARTING if state is EngineState.READY else state}")
        return model, tokenizer

    def fingerprint(self, model: ServedModel) -> str:
        """Equal for servers that should give equal answers to equal seeds."""
        config = self.config
        parts = (model.name, config.load_format, config.dtype, config.layer_split)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
        return f"stagewire-{__version__}-pp{config.pipeline_parallel_size}-{digest}"


class GenerationEndpoint(Generic[R]):
    """An ASGI application for one dialect's route."""

    def __init__(self, service: Service, dialect: Dialect[R]) -> None:
        self._service = service
        self._dialect = dialect
        self._decoder = msgspec.json.Decoder(dialect.request_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at = time.perf_counter()
        answer = _Answer(scope, receive, send)
        try:
            body = await read_body(scope, receive, self._service.config.max_body_bytes)
        except ClientGone:
            return
        except ApiError as exc:
            await self._refuse(answer, exc)
            return
        await run_until_disconnect(receive, self._respond(answer, body, arrived_at))

    async def _respond(self, answer: "_Answer", body: bytes, arrived_at: float) -> None:
        try:
            request = decode_body(self._decoder, body)
            head, generation = await self._begin(request, request_id_of(answer.scope), arrived_at)
        except Exception as exc:  # noqa: BLE001  the request's edge: whatever it is, the client is told
            await self._refuse(answer, to_api_error(exc))
            return
        try:
            async with generation:
                if request.stream:
                    await self._stream(answer, head, generation, request.stream_options or StreamOptions())
                else:
                    await self._answer_whole(answer, head, generation)
        except Exception as exc:  # noqa: BLE001  as above
            error = to_api_error(exc)
            if answer.has_started:
                await answer.end(events.error_events(error))
            elif generation.is_refused:
                await self._refuse(answer, error)
            else:
                await error_response(error)(answer.scope, answer.receive, answer.send)

    async def _begin(self, request: R, request_id: str, arrived_at: float) -> tuple[AnswerHead, Generation]:
        service, dialect = self._service, self._dialect
        model, tokenizer = service.require_model()
        check_model(request.model, model)
        refuse_unsupported(request)
        stop = stop_strings(request)
        prompt = await dialect.prompt_token_ids(request, tokenizer, model)
        params = sampling_params(
            request, model, dialect.prompt_field, len(prompt), dialect.limit(request), dialect.default_max_tokens
        )
        unique_id = f"{request_id}-{secrets.token_hex(4)}"  # a client may use its X-Request-Id more than once
        head = AnswerHead(
            id=dialect.id_prefix + unique_id,
            created=int(time.time()),
            model=model.name,
            system_fingerprint=service.fingerprint(model),
        )
        generation = Generation(
            service.engine,
            service.metrics,
            request_id=unique_id,
            prompt_token_ids=prompt,
            params=params,
            detokenizer=tokenizer.detokenizer(stop, request.skip_special_tokens is not False),
            arrived_at=arrived_at,
        )
        return head, generation

    async def _answer_whole(self, answer: "_Answer", head: AnswerHead, generation: Generation) -> None:
        parts: list[str] = []
        while generation.finish_reason is None:
            parts.append(await generation.next_text())
        body = self._dialect.answer(head, "".join(parts), generation)
        await json_response(body)(answer.scope, answer.receive, answer.send)

    async def _stream(self, answer: "_Answer", head: AnswerHead, generation: Generation, options: StreamOptions) -> None:
        dialect = self._dialect
        waiting = dialect.first_events(head)  # goes out with the first text
        while True:
            text = await generation.next_text()  # before the head, so that a request not admitted gets its own status
            usage = generation.usage if options.continuous_usage_stats else None
            if generation.finish_reason is not None:
                break
            if text:
                await answer.add(waiting + dialect.text_event(head, text, usage))
                waiting = b""
        end = waiting + dialect.last_events(head, text, generation, usage)
        if options.include_usage:
            end += dialect.usage_event(head, generation.usage)
        await answer.end(end + events.DONE)

    async def _refuse(self, answer: "_Answer", error: ApiError) -> None:
        metrics = self._service.metrics
        if error.status == 500:
            metrics.requests_finished["error"].inc()
        else:
            metrics.requests_rejected[_REJECTIONS.get(error.status, "invalid")].inc()
        await error_response(error)(answer.scope, answer.receive, answer.send)


class _Answer:
    """The way back to one client; an event stream begins with its first bytes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.has_started = False

    async def add(self, data: bytes) -> None:
        await self._start()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        await self._start()
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self.send({"type": "http.response.start", "status": 200, "headers": list(events.HEADERS)})
