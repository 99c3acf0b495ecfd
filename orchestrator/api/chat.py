"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from orchestrator.api.dialect import AnswerHead, Dialect
from orchestrator.api.errors import invalid
from orchestrator.api.events import event
from orchestrator.api.generation import Generation
from orchestrator.api.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    Usage,
)
from orchestrator.api.tokenizing import encode_chat
from orchestrator.request import FinishReason, ServedModel
from orchestrator.tokenizer import Tokenizer


class Chat(Dialect[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    default_max_tokens = None

    async def prompt_token_ids(self, request: ChatRequest, tokenizer: Tokenizer, model: ServedModel) -> list[int]:
        if request.messages is not None and len(request.messages) > model.max_model_len:
            # Each takes a token at least. Told before any work is done for them: it would hold up the streams of others.
            rule = f"{len(request.messages)} of them must be fewer than the tokens of the context, {model.max_model_len}"
            raise invalid(f"messages: {rule}", "messages", "context_length_exceeded")
        messages = _messages(request)
        add_generation_prompt = request.add_generation_prompt is not False
        variables = request.chat_template_kwargs or {}
        for name in ("messages", "add_generation_prompt"):
            if name in variables:
                raise invalid(f"chat_template_kwargs: must not contain {name}", "chat_template_kwargs")
        return await encode_chat(tokenizer, messages, add_generation_prompt, variables)

    def limit(self, request: ChatRequest) -> tuple[str, int | None]:
        if request.max_completion_tokens is not None:
            return "max_completion_tokens", request.max_completion_tokens
        return "max_tokens", request.max_tokens

    def answer(self, head: AnswerHead, text: str, generation: Generation) -> ChatCompletion:
        choice = ChatChoice(
            message=ChatMessage(content=text),
            finish_reason=generation.finish_reason or FinishReason.STOP,
            stop_reason=generation.stop_reason,
        )
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[choice],
            usage=generation.usage,
        )

    def first_events(self, head: AnswerHead) -> bytes:
        return _chunk_event(head, ChatChunkChoice(delta=ChatDelta(role="assistant", content="")), None)

    def text_event(self, head: AnswerHead, text: str, usage: Usage | None) -> bytes:
        return _chunk_event(head, ChatChunkChoice(delta=ChatDelta(content=text)), usage)

    def last_events(self, head: AnswerHead, text: str, generation: Generation, usage: Usage | None) -> bytes:
        end = ChatChunkChoice(delta=ChatDelta(), finish_reason=generation.finish_reason, stop_reason=generation.stop_reason)
        rest = self.text_event(head, text, usage) if text else b""
        return rest + _chunk_event(head, end, usage)

    def usage_event(self, head: AnswerHead, usage: Usage) -> bytes:
        return _chunk_event(head, None, usage)


def _chunk_event(head: AnswerHead, choice: ChatChunkChoice | None, usage: Usage | None) -> bytes:
    chunk = ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[] if choice is None else [choice],
        usage=msgspec.UNSET if usage is None else usage,
    )
    return event(chunk)


def _messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as templates expect them: ``content`` is text. Other keys of a message are the template's business."""
    if not request.messages:
        raise invalid("messages: must have at least one message", "messages", "missing_required_parameter")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise invalid(f"{where}.role: must be given as text", f"{where}.role")
    return {**message, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str:
    if content is None:  # as of an assistant's message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: must be text or a list of text parts", where)
    parts = cast("list[object]", content)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(parts))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, object]", part)
        text = fields.get("text")
        if fields.get("type", "text") == "text" and isinstance(text, str):
            return text
    raise invalid(f"{where}: must be a part of type text; others are not supported", where)
