"""What a request asks of sampling, checked against the model."""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

from orchestrator.api.errors import ApiError, invalid, unsupported
from orchestrator.api.generation import Prompt
from orchestrator.api.schema import GenerationRequest
from orchestrator.request import SamplingParams, ServedModel
from stages.plan import MAX_LOGPROBS

# Each token is compared with every stop string, so that both numbers bound the work per token.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024  # they travel with the request to every rank
MAX_N = 128


@dataclass(frozen=True)
class TokenLimit:
    """The field that bounds the answer, and its value, which must be at least ``least``. Without a value the answer has at most
    ``default`` tokens, or what is left of the context."""

    field: str
    wanted: int | None
    default: int | None
    least: int = 1


def check_model(name: str | None, model: ServedModel) -> None:
    if name and name != model.name:
        raise ApiError(
            404, f"model {name[:100]}: not served here; this server has {model.name}", code="model_not_found", param="model"
        )


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    stop = request.stop
    found = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > MAX_STOP_STRINGS:
        raise invalid(f"stop: {len(found)} strings given, must be at most {MAX_STOP_STRINGS}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in found):
        raise invalid(f"stop: every string must have between 1 and {MAX_STOP_CHARS} characters", "stop")
    return found


def token_ids(given: list[Any], field: str, model: ServedModel) -> list[int]:
    """``given`` as token ids of the model; a 400 names the first that is none."""
    for token_id in given:
        if type(token_id) is not int or not 0 <= token_id < model.vocab_size:
            shown = (
                token_id if type(token_id) is int and abs(token_id) < 2**63 else f"a value of type {type(token_id).__name__}"
            )
            raise invalid(f"{field}: {shown} is not a token id; must be between 0 and {model.vocab_size - 1}", field)
    return cast("list[int]", given)


def num_choices(request: GenerationRequest, num_prompts: int, max_choices: int) -> int:
    """Choices for each prompt; the request may have ``max_choices`` in all."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise invalid(f"n {n}: must be between 1 and {MAX_N}", "n")
    if request.best_of is not None and request.best_of != n:
        raise unsupported("best_of", f"must be n, {n}: this server does not choose among answers")
    if num_prompts * n > max_choices:
        field = "n" if num_prompts == 1 else "prompt"
        rule = f"{num_prompts} prompts with n {n} each must be at most {max_choices} answers in all (--max-queue)"
        raise invalid(f"{field}: {rule}", field)
    return n


def seed_of_choice(seed: int | None, number: int) -> int | None:
    """The seed of a prompt's choice ``number``: the first has the request's own, so that it is what it is alone."""
    if seed is None or number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def checked_num_logprobs(field: str, number: int) -> int:
    if not 0 <= number <= MAX_LOGPROBS:
        raise invalid(f"{field} {number}: must be between 0 and {MAX_LOGPROBS}", field)
    return number


def sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    prompt: Prompt,
    limit: TokenLimit,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    stop_token_ids = request.stop_token_ids or []
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids: {len(stop_token_ids)} given, must be at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids")
    top_k = request.top_k or 0
    return SamplingParams(
        max_tokens=_max_tokens(model, prompt, limit),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        # -1 is another way to say off; more than the vocabulary is all of it, and must not outgrow the plan's integers
        top_k=0 if top_k == -1 else min(top_k, model.vocab_size),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        stop_token_ids=frozenset(token_ids(stop_token_ids, "stop_token_ids", model)),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _logit_bias(given: dict[str, float], model: ServedModel) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias: {len(given)} tokens given, must be at most {MAX_LOGIT_BIASES}", "logit_bias")
    found: dict[int, float] = {}
    for key, bias in given.items():
        # JSON's keys are text. What int() reads beside plain digits, such as "1_0", is none.
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
        if not 0 <= token_id < model.vocab_size:
            raise invalid(
                f"logit_bias: {key[:20]!r} is not a token id; must be between 0 and {model.vocab_size - 1}", "logit_bias"
            )
        found[token_id] = bias
    return found


def _max_tokens(model: ServedModel, prompt: Prompt, limit: TokenLimit) -> int:
    field, wanted = limit.field, limit.wanted
    prompt_field, num_prompt_tokens = prompt.field, len(prompt.token_ids)
    context = model.max_model_len
    left = context - num_prompt_tokens
    if wanted is not None and wanted < limit.least:
        raise invalid(f"{field} {wanted}: must be at least {limit.least}", field)
    if left < (1 if wanted is None else min(wanted, 1)):
        rule = f"{num_prompt_tokens} tokens must be below the context length, {context}"
        raise _too_long(f"{prompt_field}: {rule}", prompt_field)
    if wanted is not None and wanted > left:
        rule = f"with the prompt's {num_prompt_tokens} tokens must be at most the context length, {context}"
        raise _too_long(f"{field} {wanted}: {rule}", field)
    if wanted is not None:
        return wanted
    return left if limit.default is None else min(limit.default, left)


def _too_long(message: str, param: str) -> ApiError:
    return invalid(message, param, "context_length_exceeded")
