"""A request as the engine sees it. Plain state: no I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stages.errors import ConfigError, StagewireError
from stages.plan import MAX_LOGPROBS, TokenLogprobs

MAX_BIAS = 100.0


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client went away


class EngineState(StrEnum):
    STARTING = "starting"  # ranks are loading or linking
    READY = "ready"  # a probe step went through every boundary; requests are admitted
    RECOVERING = "recovering"  # a rank was lost, and no step has gone through since; requests are admitted, and wait
    DRAINING = "draining"  # admits nothing, finishes everything
    FAILED = "failed"  # ranks are lost for good and the engine is about to end

    @property
    def admits(self) -> bool:
        """Whether requests are taken."""
        return self in (EngineState.READY, EngineState.RECOVERING)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What clients may know of the model. ``created`` is in Unix seconds; ``max_model_len`` counts prompt plus answer."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    created: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What the client asked of sampling, checked and with defaults filled in.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None lets the engine draw one.
    ``max_tokens`` counts generated tokens; with 0 the prompt is computed and nothing is generated. ``stop_token_ids`` end the
    generation besides the model's own end-of-sequence ids, which ``ignore_eos`` turns off; none of those that would end it
    is sampled among the first ``min_tokens``. ``repetition_penalty`` 1 and the other penalties 0 are off; ``stages.history``
    defines them. ``logit_bias`` is added to the logits of its token ids. ``num_logprobs`` is the number of most probable tokens
    that are told with each generated token and its log-probability, ``num_prompt_logprobs`` the same for each token of the
    prompt but the first; None is no log-probabilities.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(is_ok: bool, name: str, rule: str) -> None:
            if not is_ok:
                raise ConfigError(f"{name} {getattr(self, name)}: {rule}")

        check(self.max_tokens >= 0, "max_tokens", "must be at least 0")
        check(0 <= self.temperature <= 100, "temperature", "must be between 0 and 100")
        check(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        check(self.top_k >= 0, "top_k", "must be at least 0 (0 is off)")
        check(0 <= self.min_p <= 1, "min_p", "must be between 0 and 1")
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"must be between 0 and max_tokens, {self.max_tokens}")
        check(0 < self.repetition_penalty <= 100, "repetition_penalty", "must be above 0 and at most 100")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "must be between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must be between -2 and 2")
        for token_id, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ConfigError(f"logit_bias {bias}: of token {token_id} must be between {-MAX_BIAS:g} and {MAX_BIAS:g}")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            number: int | None = getattr(self, name)
            check(number is None or 0 <= number <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that one step gave to one request; ``finish_reason`` is set on the last chunk of a request.

    A token that ended the generation (end of sequence or a stop token) is in ``token_ids``; ``stop_token_id`` names it.
    ``logprobs`` has one entry for each token if they were asked for, and the first chunk has those of the prompt's tokens, from
    the second on, in ``prompt_logprobs``, and in ``planned_at_ns`` when the request was first part of a plan
    (``time.perf_counter_ns``; 0 where that is not known).
    """

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    planned_at_ns: int = 0


class QueueFull(StagewireError):
    """As many requests wait as ``--max-queue`` allows; try again after ``retry_after_seconds``."""

    retry_after_seconds = 1


class NotReady(StagewireError):
    """The engine is starting, draining or failed, and admits no request."""

    retry_after_seconds = 2


class ShutDown(StagewireError):
    """The worker ended before the request was finished; another worker may serve it."""

    retry_after_seconds = 2


@dataclass(eq=False, kw_only=True)
class Request:
    """One generation. The engine owns it from admission to its last token, whatever happens to the ranks.

    ``token_ids`` is the prompt followed by what was generated, ``prompt_logprobs`` those known so far. Placement (slot, blocks,
    progress) belongs to the Scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    planned_at_ns: int = 0  # set by the engine

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)
