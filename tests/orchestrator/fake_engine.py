"""An engine that plays a script: it goes as far as it is told, and says what happened to each request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from orchestrator.request import EngineState, FinishReason, SamplingParams, ServedModel, TokenChunk

Step = TokenChunk | BaseException | asyncio.Event
"""A chunk to give, an error to raise, or an event to wait for."""

MODEL = ServedModel(name="small", max_model_len=64, vocab_size=400, eos_token_ids=frozenset({2}), created=1700000000)


@dataclass(eq=False)
class Call:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_aborted: bool = False


class FakeEngine:
    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = script
        self.state = EngineState.READY
        self.served_model: ServedModel | None = MODEL
        self.num_running = 0
        self.num_waiting = 0
        self.calls: list[Call] = []
        self.was_called = asyncio.Event()
        self._started: list[AsyncGenerator[TokenChunk, None]] = []  # kept, so that only its user closes one

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        call = Call(request_id, prompt_token_ids, params)
        self.calls.append(call)
        chunks = self._play(call)
        self._started.append(chunks)
        return chunks

    async def _play(self, call: Call) -> AsyncGenerator[TokenChunk, None]:
        self.was_called.set()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            call.was_aborted = True
            raise
        finally:
            call.has_ended.set()


def chunks(token_ids: Sequence[int], reason: FinishReason | None = FinishReason.LENGTH) -> list[Step]:
    """One chunk a token, the last with ``reason``."""
    last = len(token_ids) - 1
    return [TokenChunk([token_id], reason if i == last else None) for i, token_id in enumerate(token_ids)]
