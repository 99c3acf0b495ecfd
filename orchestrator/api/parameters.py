"""What a request asks of sampling, checked against the model."""

from typing import Any, cast

from orchestrator.api.errors import ApiError, invalid
from orchestrator.api.schema import GenerationRequest
from orchestrator.request import SamplingParams, ServedModel

# Each token is compared with every stop string, so that both numbers bound the work per token.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128


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


def sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    prompt_field: str,
    num_prompt_tokens: int,
    limit: tuple[str, int | None],
    default: int | None,
) -> SamplingParams:
    """``prompt_field`` is the field that the prompt came in. ``limit`` is the field that bounds the answer, and its value;
    without a value the answer has at most ``default`` tokens, or what is left of the context.
    """
    stop_token_ids = request.stop_token_ids or []
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids: {len(stop_token_ids)} given, must be at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids")
    top_k = request.top_k or 0
    return SamplingParams(
        max_tokens=_max_tokens(model, prompt_field, num_prompt_tokens, limit, default),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        # -1 is another way to say off; more than the vocabulary is all of it, and must not outgrow the plan's integers
        top_k=0 if top_k == -1 else min(top_k, model.vocab_size),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        stop_token_ids=frozenset(token_ids(stop_token_ids, "stop_token_ids", model)),
        ignore_eos=bool(request.ignore_eos),
    )


def _max_tokens(
    model: ServedModel, prompt_field: str, num_prompt_tokens: int, limit: tuple[str, int | None], default: int | None
) -> int:
    field, wanted = limit
    context = model.max_model_len
    left = context - num_prompt_tokens
    if wanted is not None and wanted < 1:
        raise invalid(f"{field} {wanted}: must be at least 1", field)
    if left < 1:
        rule = f"{num_prompt_tokens} tokens must be below the context length, {context}"
        raise _too_long(f"{prompt_field}: {rule}", prompt_field)
    if wanted is not None and wanted > left:
        rule = f"with the prompt's {num_prompt_tokens} tokens must be at most the context length, {context}"
        raise _too_long(f"{field} {wanted}: {rule}", field)
    if wanted is not None:
        return wanted
    return left if default is None else min(default, left)


def _too_long(message: str, param: str) -> ApiError:
    return invalid(message, param, "context_length_exceeded")
