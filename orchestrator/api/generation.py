"""One admitted request: from the engine's tokens to pieces of text, measured on the way."""

import asyncio
import time
from types import TracebackType

from metrics.catalog import Metrics
from orchestrator.api.engine_client import EngineClient
from orchestrator.api.errors import ApiError
from orchestrator.api.schema import Usage
from orchestrator.detokenizer import IncrementalDetokenizer
from orchestrator.request import FinishReason, NotReady, QueueFull, SamplingParams
from stages.errors import ConfigError


class Generation:
    """An async context: leaving it aborts what the engine has not finished, and counts how the request ended."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        arrived_at: float,
    ) -> None:
        """``arrived_at`` is a ``time.perf_counter()``."""
        self._metrics = metrics
        self._detokenizer = detokenizer
        self._stop_token_ids = params.stop_token_ids
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_generated = 0
        self._arrived_at = arrived_at
        self._last_chunk_at = 0.0
        self._chunks = engine.generate(request_id, prompt_token_ids, params)
        self.is_refused = False  # by the engine, known when the context is left
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def usage(self) -> Usage:
        num_prompt, num_generated = self._num_prompt_tokens, self._num_generated
        return Usage(num_prompt, num_generated, num_prompt + num_generated)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_refused = self._num_generated == 0 and isinstance(exc, (QueueFull, NotReady, ConfigError))
        if not self.is_refused:
            self._metrics.requests_finished[self._outcome(exc)].inc()
        await self._chunks.aclose()

    def _outcome(self, exc: BaseException | None) -> str:
        if self.finish_reason is not None:  # whatever came after: the generation itself was complete
            return self.finish_reason
        return FinishReason.ABORT if isinstance(exc, (asyncio.CancelledError, GeneratorExit)) else "error"

    async def next_text(self) -> str:
        """The text of the next chunk, maybe empty; the last one sets ``finish_reason``.

        Raises what the engine raises; an engine that gives up on the request is an ``ApiError``, never a short answer.
        """
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            raise _given_up() from None
        if chunk.finish_reason is FinishReason.ABORT:
            raise _given_up()
        self._measure(len(chunk.token_ids))
        if chunk.finish_reason is None:
            text = self._detokenizer.push(chunk.token_ids)
        else:
            shown = chunk.token_ids if chunk.stop_token_id is None else chunk.token_ids[:-1]
            text = self._detokenizer.push(shown) + self._detokenizer.flush()
        self._finish(chunk.finish_reason, chunk.stop_token_id)
        return text

    def _measure(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._num_generated == 0:
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        else:
            self._metrics.inter_token_latency.observe(now - self._last_chunk_at)
        self._metrics.generated_tokens.inc(num_tokens)
        self._num_generated += num_tokens
        self._last_chunk_at = now

    def _finish(self, reason: FinishReason | None, stop_token_id: int | None) -> None:
        if self._detokenizer.stopped_by is not None:  # the engine knows nothing of stop strings: closing it ends the request
            reason, self.stop_reason = FinishReason.STOP, self._detokenizer.stopped_by
        elif stop_token_id in self._stop_token_ids:  # for the model's own end of sequence it stays None
            self.stop_reason = stop_token_id
        if reason is not None:
            self.finish_reason = reason
            self._metrics.e2e_request_latency.observe(self._last_chunk_at - self._arrived_at)


def _given_up() -> ApiError:
    return ApiError(503, "the server ended the generation", code="aborted", type="server_error", headers={"retry-after": "2"})
