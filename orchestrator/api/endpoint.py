"""What both generating routes do: read, check, generate, answer."""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

import msgspec
from starlette.types import Receive, Scope, Send

from metrics.engine import EngineMetrics
from orchestrator import __version__
from orchestrator.api import events
from orchestrator.api.body import ClientGone, decode_body, read_body
from orchestrator.api.delivery import Answer, Delivery
from orchestrator.api.dialect import AnswerHead, Dialect, R
from orchestrator.api.disconnect import run_until_disconnect
from orchestrator.api.engine_client import EngineClient
from orchestrator.api.errors import ApiError, to_api_error
from orchestrator.api.generation import Generation, Generations, Prompt, TextOptions
from orchestrator.api.parameters import check_model, num_choices, sampling_params, seed_of_choice, stop_strings
from orchestrator.api.request_id import request_id_of
from orchestrator.api.responses import error_response
from orchestrator.api.schema import StreamOptions, refuse_unsupported
from orchestrator.config import ServeConfig
from orchestrator.request import EngineState, NotReady, SamplingParams, ServedModel
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
    metrics: EngineMetrics

    def require_model(self) -> tuple[ServedModel, Tokenizer]:
        """``NotReady`` unless requests are admitted."""
        model, tokenizer, state = self.engine.served_model, self.tokenizer_provider(), self.engine.state
        if not state.admits or model is None or tokenizer is None:
            raise NotReady(f"the server is {EngineState.STARTING if state.admits else state}")
        return model, tokenizer

    def fingerprint(self, model: ServedModel) -> str:
        """Equal for servers that should give equal answers to equal seeds."""
        config = self.config
        parts = (model.name, config.load_format, config.dtype, config.layer_split)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
        return f"stagewire-{__version__}-pp{config.pipeline_parallel_size}-{digest}"


class GenerationEndpoint(Generic[R]):
    """An ASGI application for one dialect's route."""

    def __init__(self, service: Service, dialect: Dialect[R, Any]) -> None:
        self._service = service
        self._dialect = dialect
        self._decoder = msgspec.json.Decoder(dialect.request_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at_ns = time.perf_counter_ns()
        answer = Answer(scope, receive, send)
        try:
            body = await read_body(scope, receive, self._service.config.max_body_bytes)
        except ClientGone:
            return
        except ApiError as exc:
            await self._refuse(answer, exc)
            return
        await run_until_disconnect(receive, self._respond(answer, body, arrived_at_ns))

    async def _respond(self, answer: Answer, body: bytes, arrived_at_ns: int) -> None:
        try:
            request = decode_body(self._decoder, body)
            delivery = await self._begin(answer, request, arrived_at_ns)
        except Exception as exc:  # noqa: BLE001  the request's edge: whatever it is, the client is told
            await self._refuse(answer, to_api_error(exc))
            return
        try:
            async with delivery.generations:
                if request.stream:
                    await delivery.stream(request.stream_options or StreamOptions())
                else:
                    await delivery.send_whole()
        except Exception as exc:  # noqa: BLE001  as above
            error = to_api_error(exc)
            if answer.has_started:
                await answer.end(events.error_events(error))
            elif delivery.generations.is_refused:
                await self._refuse(answer, error)
            else:
                await error_response(error)(answer.scope, answer.receive, answer.send)

    async def _begin(self, answer: Answer, request: R, arrived_at_ns: int) -> Delivery:
        service, dialect = self._service, self._dialect
        model, tokenizer = service.require_model()
        check_model(request.model, model)
        refuse_unsupported(request)
        text_options = TextOptions(
            stop=stop_strings(request),
            includes_stop=bool(request.include_stop_str_in_output),
            skips_special_tokens=request.skip_special_tokens is not False,
            is_echoed=dialect.is_echoed(request),
        )
        num_logprobs = dialect.num_logprobs(request)
        prompts = await dialect.prompts(request, tokenizer, model)
        n = num_choices(request, len(prompts), service.config.max_queue)
        to_generate: list[tuple[Prompt, SamplingParams]] = []
        for prompt in prompts:
            params = sampling_params(
                request, model, prompt, dialect.limit(request), num_logprobs, num_logprobs if text_options.is_echoed else None
            )
            to_generate += [(prompt, replace(params, seed=seed_of_choice(params.seed, number))) for number in range(n)]
        unique_id = f"{request_id_of(answer.scope)}-{secrets.token_hex(4)}"  # an X-Request-Id may come more than once
        choices = [
            Generation(
                service.engine,
                service.metrics,
                tokenizer,
                index=index,
                request_id=unique_id if index == 0 else f"{unique_id}-{index}",
                prompt=prompt,
                params=params,
                text_options=text_options,
                arrived_at_ns=arrived_at_ns,
            )
            for index, (prompt, params) in enumerate(to_generate)
        ]
        return Delivery(
            answer=answer,
            dialect=dialect,
            head=AnswerHead(
                id=dialect.id_prefix + unique_id,
                created=int(time.time()),
                model=model.name,
                system_fingerprint=service.fingerprint(model),
            ),
            generations=Generations(choices, sum(len(prompt.token_ids) for prompt in prompts)),
            tokenizer=tokenizer,
            tells_logprobs=num_logprobs is not None,
        )

    async def _refuse(self, answer: Answer, error: ApiError) -> None:
        metrics = self._service.metrics
        if error.status == 500:
            metrics.requests_finished["error"].add()
        else:
            metrics.requests_rejected[_REJECTIONS.get(error.status, "invalid")].add()
        await error_response(error)(answer.scope, answer.receive, answer.send)
