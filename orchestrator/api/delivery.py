"""The answer to one client, whole or as a stream of events."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from orchestrator.api import events
from orchestrator.api.dialect import AnswerHead, Dialect, Piece
from orchestrator.api.generation import Generation, Generations
from orchestrator.api.logprobs import ToldToken
from orchestrator.api.responses import json_response
from orchestrator.api.schema import StreamOptions
from orchestrator.api.together import together
from orchestrator.tokenizer import Tokenizer


class Answer:
    """The way back to one client; an event stream begins with its first bytes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.has_started = False
        self._turn = asyncio.Lock()  # choices that are generated at once write one after the other

    async def add(self, data: bytes) -> None:
        await self._write(data, more_body=True)

    async def end(self, data: bytes) -> None:
        await self._write(data, more_body=False)

    async def _write(self, data: bytes, more_body: bool) -> None:
        async with self._turn:
            if not self.has_started:
                self.has_started = True
                await self.send({"type": "http.response.start", "status": 200, "headers": list(events.HEADERS)})
            await self.send({"type": "http.response.body", "body": data, "more_body": more_body})


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What is generated for a request, on its way to the client in a dialect's form."""

    answer: Answer
    dialect: Dialect[Any, Any]
    head: AnswerHead
    generations: Generations
    tokenizer: Tokenizer
    tells_logprobs: bool

    async def send_whole(self) -> None:
        choices = self.generations.choices
        rests = await together([choice.rest() for choice in choices])
        pieces = [(self._piece(choice, text, told), choice) for choice, (text, told) in zip(choices, rests, strict=True)]
        body = self.dialect.answer(self.head, pieces, self.generations.usage)
        answer = self.answer
        await json_response(body)(answer.scope, answer.receive, answer.send)

    async def stream(self, options: StreamOptions) -> None:
        """Every choice as it comes. What is left to say at the end of the only choice, or of none, goes out with the end."""
        choices = self.generations.choices
        tells_usage = options.continuous_usage_stats is True
        if len(choices) == 1:
            end = await self._stream_choice(choices[0], tells_usage)
        else:
            await together([self._stream_one_of_several(choice, tells_usage) for choice in choices])
            end = b""
        if options.include_usage:
            end += self.dialect.usage_event(self.head, self.generations.usage)
        await self.answer.end(end + events.DONE)

    async def _stream_one_of_several(self, choice: Generation, tells_usage: bool) -> None:
        await self.answer.add(await self._stream_choice(choice, tells_usage))

    async def _stream_choice(self, choice: Generation, tells_usage: bool) -> bytes:
        """Send a choice up to its last events, which are returned."""
        is_begun = False
        while True:
            text, told = await choice.next_text()  # before the head, so that a request not admitted gets its own status
            is_last = choice.finish_reason is not None
            if not (is_last or text or told):
                continue
            piece, head = self._piece(choice, text, told, tells_usage), b""
            if not is_begun:  # goes out with the first text
                is_begun = True
                usage = self.generations.usage_before(choice) if tells_usage else None
                head = self.dialect.first_events(self.head, choice.index, usage)
            if is_last:
                return head + self.dialect.last_events(self.head, piece, choice)
            await self.answer.add(head + self.dialect.text_event(self.head, piece))

    def _piece(self, choice: Generation, text: str, told: Sequence[ToldToken], tells_usage: bool = False) -> Piece[Any]:
        return Piece(
            index=choice.index,
            text=text,
            logprobs=self.dialect.logprobs(told, self.tokenizer) if self.tells_logprobs else None,
            usage=self.generations.usage if tells_usage else None,
        )
