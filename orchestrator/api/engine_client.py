"""What the API needs of an engine."""

from collections.abc import AsyncGenerator
from typing import Protocol

from orchestrator.request import EngineState, SamplingParams, ServedModel, TokenChunk


class EngineClient(Protocol):
    @property
    def state(self) -> EngineState: ...

    @property
    def served_model(self) -> ServedModel | None:
        """None until starting got far enough to know the model."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one request, the last chunk with a ``finish_reason``. ``request_id`` is unique.

        Before the first chunk it raises ``QueueFull``, ``NotReady`` or ``ConfigError`` for a request that is not admitted;
        at any time ``StageFailed``. Closing it aborts the request.
        """
        ...
