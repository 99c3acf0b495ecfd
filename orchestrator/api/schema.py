"""The JSON of the OpenAI routes, as far as we read and write it.

A field that is null counts as not given, and fields that are not listed are accepted and ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from orchestrator.api.errors import unsupported


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have. The fields typed ``Any`` are read only to refuse them (``refuse_unsupported``)."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    prompt_logprobs: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    return_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``prompt``: text, token ids, or a list of these. ``logprobs``: the number of most probable tokens to tell of."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None

    top_logprobs: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    echo: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    continue_final_message: Any = None


def _is_empty(value: Any) -> bool:
    return value is False or value in ("", [], {})


def _equals(*harmless: object) -> Callable[[Any], bool]:
    return lambda value: value in harmless


# For each field that would change the output and is not supported: the values with which it changes nothing.
_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "prompt_logprobs": _is_empty,
    "length_penalty": _equals(1),
    "bad_words": _is_empty,
    "allowed_token_ids": lambda value: False,
    "logits_processors": _is_empty,
    "use_beam_search": _is_empty,
    "return_token_ids": _is_empty,
    "truncate_prompt_tokens": lambda value: False,
    "response_format": _equals({"type": "text"}),
    "structured_outputs": _is_empty,
    "guided_json": _is_empty,
    "guided_regex": _is_empty,
    "guided_choice": _is_empty,
    "guided_grammar": _is_empty,
}
_HARMLESS_IN_COMPLETIONS: Mapping[str, Callable[[Any], bool]] = {
    "top_logprobs": _equals(0),
    "suffix": _is_empty,
    "prompt_embeds": _is_empty,
}
_HARMLESS_IN_CHAT: Mapping[str, Callable[[Any], bool]] = {
    "echo": _is_empty,
    "tools": _is_empty,
    "tool_choice": _equals("none", "auto"),
    "functions": _is_empty,
    "function_call": _equals("none", "auto"),
    "modalities": _equals([], ["text"]),
    "audio": _is_empty,
    "reasoning_effort": _equals("none"),
    "web_search_options": lambda value: False,
    "documents": _is_empty,
    "chat_template": lambda value: False,
    "continue_final_message": _is_empty,
}


def refuse_unsupported(request: GenerationRequest) -> None:
    """A 400 for the first field that asks for something we would otherwise ignore silently."""
    of_its_kind = _HARMLESS_IN_CHAT if isinstance(request, ChatRequest) else _HARMLESS_IN_COMPLETIONS
    for field, is_harmless in (*_HARMLESS.items(), *of_its_kind.items()):
        value = getattr(request, field, None)
        if value is not None and not is_harmless(value):
            raise unsupported(field, "this value is not supported by this server")


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists, one entry for each token. The first token of an echoed prompt has null for both its log-probabilities.

    ``text_offset`` is where a token's text begins in the choice's text, in characters. A token that is only a part of a
    character is written as ``bytes:`` followed by its bytes as ``\\xNN``.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """``stop_reason`` is the stop string or stop token id that ended the text, if one did."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or with one piece of text an event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str


class ChatTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes`` are exact also where the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt`` or ``messages``. ``add_special_tokens`` is for a prompt, the others but ``return_token_strs`` for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[Any] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests: those under way, those that wait, and both."""

    num_running: int
    num_waiting: int
    server_load: int


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "stagewire"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
