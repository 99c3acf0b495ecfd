"""What differs between the completions and the chat route."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.api.generation import Generation, Prompt
from orchestrator.api.logprobs import ToldToken
from orchestrator.api.parameters import TokenLimit
from orchestrator.api.schema import ChatLogprobs, CompletionLogprobs, GenerationRequest, Usage
from orchestrator.request import ServedModel
from orchestrator.tokenizer import Tokenizer

R = TypeVar("R", bound=GenerationRequest)
L = TypeVar("L", CompletionLogprobs, ChatLogprobs)


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """What every piece of an answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[L]):
    """Some text of the choice ``index``, and what is told of its tokens; a whole answer is one piece."""

    index: int
    text: str
    logprobs: L | None
    usage: Usage | None = None


class Dialect(ABC, Generic[R, L]):
    request_type: type[R]
    id_prefix: str

    @abstractmethod
    async def prompts(self, request: R, tokenizer: Tokenizer, model: ServedModel) -> list[Prompt]:
        """The prompts; ``ApiError`` or ``ConfigError`` naming the field when it cannot be one."""

    @abstractmethod
    def limit(self, request: R) -> TokenLimit: ...

    @abstractmethod
    def num_logprobs(self, request: R) -> int | None:
        """How many of the most probable tokens are told with each token; None when no log-probabilities are."""

    @abstractmethod
    def is_echoed(self, request: R) -> bool:
        """Whether the answer begins with the prompt."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> L: ...

    @abstractmethod
    def answer(self, head: AnswerHead, choices: Sequence[tuple[Piece[L], Generation]], usage: Usage) -> object:
        """The body of a whole answer."""

    @abstractmethod
    def first_events(self, head: AnswerHead, index: int, usage: Usage | None) -> bytes:
        """What a choice's stream begins with."""

    @abstractmethod
    def text_event(self, head: AnswerHead, piece: Piece[L]) -> bytes: ...

    @abstractmethod
    def last_events(self, head: AnswerHead, piece: Piece[L], generation: Generation) -> bytes:
        """The rest of a choice, and why it ended."""

    @abstractmethod
    def usage_event(self, head: AnswerHead, usage: Usage) -> bytes: ...
