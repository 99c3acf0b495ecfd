"""What differs between the completions and the chat route."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.api.generation import Generation
from orchestrator.api.schema import GenerationRequest, Usage
from orchestrator.request import ServedModel
from orchestrator.tokenizer import Tokenizer

R = TypeVar("R", bound=GenerationRequest)


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """What every piece of an answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Dialect(ABC, Generic[R]):
    request_type: type[R]
    id_prefix: str
    prompt_field: str
    default_max_tokens: int | None  # None: what is left of the context

    @abstractmethod
    async def prompt_token_ids(self, request: R, tokenizer: Tokenizer, model: ServedModel) -> list[int]:
        """The prompt; ``ApiError`` or ``ConfigError`` naming the field when it cannot be one."""

    @abstractmethod
    def limit(self, request: R) -> tuple[str, int | None]:
        """The name and value of the field that bounds the number of generated tokens."""

    @abstractmethod
    def answer(self, head: AnswerHead, text: str, generation: Generation) -> object:
        """The body of a whole answer."""

    @abstractmethod
    def first_events(self, head: AnswerHead) -> bytes:
        """What a stream begins with."""

    @abstractmethod
    def text_event(self, head: AnswerHead, text: str, usage: Usage | None) -> bytes: ...

    @abstractmethod
    def last_events(self, head: AnswerHead, text: str, generation: Generation, usage: Usage | None) -> bytes:
        """The rest of the text, and why it ended."""

    @abstractmethod
    def usage_event(self, head: AnswerHead, usage: Usage) -> bytes: ...
