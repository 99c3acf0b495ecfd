"""A request's generations: from the engine's tokens to pieces of text, measured on the way."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

from metrics.engine import EngineMetrics
from orchestrator.api.engine_client import EngineClient
from orchestrator.api.errors import ApiError
from orchestrator.api.logprobs import ToldToken
from orchestrator.api.schema import Usage
from orchestrator.detokenizer import TextStream
from orchestrator.request import FinishReason, NotReady, QueueFull, SamplingParams, TokenChunk
from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError
from stages.plan import TokenLogprobs


@dataclass(frozen=True)
class Prompt:
    """What came in ``field``. ``text`` is what the client wrote, None where it gave no text of its own."""

    field: str
    token_ids: list[int]
    text: str | None


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """``stop`` are the strings that end the text, ``is_echoed``: it begins with the prompt.

    ``includes_stop``: what ended the text, a stop string or a stop token, is part of it.
    """

    stop: Sequence[str]
    includes_stop: bool
    skips_special_tokens: bool
    is_echoed: bool


class Generation:
    """One choice of an answer.

    An async context: leaving it aborts what the engine has not finished, and counts how it ended.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: EngineMetrics,
        tokenizer: Tokenizer,
        *,
        index: int,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        text_options: TextOptions,
        arrived_at_ns: int,
    ) -> None:
        """``arrived_at_ns`` is a ``time.perf_counter_ns()``."""
        skips_special = text_options.skips_special_tokens
        self.index = index
        self._metrics = metrics
        self._detokenizer = tokenizer.detokenizer(
            text_options.stop, skips_special, params.min_tokens, text_options.includes_stop
        )
        self._includes_stop = text_options.includes_stop
        self._echo = ""  # what the text still has to begin with
        if text_options.is_echoed:
            self._echo = tokenizer.decode(prompt.token_ids, skips_special) if prompt.text is None else prompt.text
        self._told: ToldTokens | None = None
        if params.num_logprobs is not None:
            echoed = prompt.token_ids if text_options.is_echoed else []
            self._told = ToldTokens(tokenizer, skips_special, echoed, len(self._echo))
        self._stop_token_ids = params.stop_token_ids
        self._num_prompt_tokens = len(prompt.token_ids)
        self._num_generated = 0
        self._arrived_at_ns = arrived_at_ns
        self._planned_at_ns = 0
        self._first_chunk_at_ns = 0
        self._last_chunk_at_ns = 0
        self._chunks = engine.generate(request_id, prompt.token_ids, params)
        self.is_refused = False  # by the engine, known when the context is left
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_generated(self) -> int:
        return self._num_generated

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_refused = self._num_generated == 0 and isinstance(exc, (QueueFull, NotReady, ConfigError))
        if not self.is_refused:
            self._metrics.requests_finished[self._outcome(exc)].add()
        await self._chunks.aclose()

    def _outcome(self, exc: BaseException | None) -> str:
        if self.finish_reason is not None:  # whatever came after: the generation itself was complete
            return self.finish_reason
        return FinishReason.ABORT if isinstance(exc, (asyncio.CancelledError, GeneratorExit)) else "error"

    async def rest(self) -> tuple[str, list[ToldToken]]:
        """Everything that ``next_text`` gives until the end, and what is told of the tokens."""
        texts: list[str] = []
        told: list[ToldToken] = []
        while self.finish_reason is None:
            text, tokens = await self.next_text()
            texts.append(text)
            told += tokens
        return "".join(texts), told

    async def next_text(self) -> tuple[str, Sequence[ToldToken]]:
        """The text of the next chunk, maybe empty, and what is told of its tokens; the last one sets ``finish_reason``.

        Raises what the engine raises; an engine that gives up on the request is an ``ApiError``, never a short answer.
        """
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            raise _given_up() from None
        if chunk.finish_reason is FinishReason.ABORT:
            raise _given_up()
        self._measure(chunk)
        told = () if self._told is None else self._told.next(chunk)
        started_at_ns = time.perf_counter_ns()
        if chunk.finish_reason is None:
            text = self._detokenizer.push(chunk.token_ids)
        else:
            is_whole = chunk.stop_token_id is None or self._includes_stop
            shown = chunk.token_ids if is_whole else chunk.token_ids[:-1]
            text = self._detokenizer.push(shown) + self._detokenizer.flush()
        self._metrics.detokenize.observe(time.perf_counter_ns() - started_at_ns)
        if self._echo:
            text, self._echo = self._echo + text, ""
        self._finish(chunk.finish_reason, chunk.stop_token_id)
        return text, told

    def _measure(self, chunk: TokenChunk) -> None:
        now, metrics = time.perf_counter_ns(), self._metrics
        if not self._first_chunk_at_ns:
            self._first_chunk_at_ns, self._planned_at_ns = now, chunk.planned_at_ns
            metrics.time_to_first_token.observe(now - self._arrived_at_ns)
            metrics.prompt_tokens.add(self._num_prompt_tokens)
        else:
            metrics.inter_token_latency.observe(now - self._last_chunk_at_ns)
        metrics.generated_tokens.add(len(chunk.token_ids))
        self._num_generated += len(chunk.token_ids)
        self._last_chunk_at_ns = now

    def _finish(self, reason: FinishReason | None, stop_token_id: int | None) -> None:
        if self._detokenizer.stopped_by is not None:  # the engine knows nothing of stop strings: closing it ends the request
            reason, self.stop_reason = FinishReason.STOP, self._detokenizer.stopped_by
        elif stop_token_id in self._stop_token_ids:  # for the model's own end of sequence it stays None
            self.stop_reason = stop_token_id
        if reason is not None:
            self.finish_reason = reason
            self._measure_whole()

    def _measure_whole(self) -> None:
        """The request's time, and its phases, which add up to it."""
        metrics, arrived, planned = self._metrics, self._arrived_at_ns, self._planned_at_ns or self._first_chunk_at_ns
        metrics.e2e_request_latency.observe(self._last_chunk_at_ns - arrived)
        metrics.request_phase["queue"].observe(planned - arrived)
        metrics.request_phase["prefill"].observe(self._first_chunk_at_ns - planned)
        decode_ns = self._last_chunk_at_ns - self._first_chunk_at_ns
        metrics.request_phase["decode"].observe(decode_ns)
        if self._num_generated > 1:
            metrics.time_per_output_token.observe(decode_ns // (self._num_generated - 1))


class ToldTokens:
    """The tokens of one choice with their log-probabilities, and where the text of each begins."""

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool, echoed: Sequence[int], num_echoed_chars: int) -> None:
        """``echoed`` are the prompt's tokens, which the first ones follow, if the text begins with the prompt."""
        self._stream = tokenizer.text_stream(skips_special_tokens)
        self._offset = num_echoed_chars
        self._echoed = echoed
        self._echo_stream = tokenizer.text_stream(skips_special_tokens)

    def next(self, chunk: TokenChunk) -> list[ToldToken]:
        told: list[ToldToken] = []
        if self._echoed:
            told, _ = _placed(self._echoed, [None, *chunk.prompt_logprobs], self._echo_stream, 0)
            self._echoed = ()
        new, self._offset = _placed(chunk.token_ids, chunk.logprobs, self._stream, self._offset)
        return told + new


def _placed(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], stream: TextStream, offset: int
) -> tuple[list[ToldToken], int]:
    """The tokens, the first of which begins at ``offset``, and where they end."""
    told: list[ToldToken] = []
    for token_id, of_token in zip(token_ids, logprobs, strict=True):
        told.append(ToldToken(token_id, offset, of_token))
        offset += len(stream.push((token_id,)))
    return told, offset


class Generations:
    """All choices of one answer. An async context, as each of them is."""

    def __init__(self, choices: Sequence[Generation], num_prompt_tokens: int) -> None:
        """``num_prompt_tokens`` counts each prompt once, however many choices it has."""
        self.choices = choices
        self._num_prompt_tokens = num_prompt_tokens
        self._stack = AsyncExitStack()

    @property
    def is_refused(self) -> bool:
        return any(choice.is_refused for choice in self.choices)

    @property
    def usage(self) -> Usage:
        return self._usage(sum(choice.num_generated for choice in self.choices))

    def usage_before(self, begun: Generation) -> Usage:
        """That of all other choices, as it is told at the head of one."""
        return self._usage(sum(choice.num_generated for choice in self.choices if choice is not begun))

    def _usage(self, num_generated: int) -> Usage:
        return Usage(self._num_prompt_tokens, num_generated, self._num_prompt_tokens + num_generated)

    async def __aenter__(self) -> "Generations":
        for choice in self.choices:
            await self._stack.enter_async_context(choice)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, traceback)


def _given_up() -> ApiError:
    return ApiError(503, "the server ended the generation", code="aborted", type="server_error", headers={"retry-after": "2"})
