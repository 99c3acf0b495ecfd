"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from orchestrator.api.dialect import AnswerHead, Dialect, Piece
from orchestrator.api.errors import invalid
from orchestrator.api.events import event
from orchestrator.api.generation import Generation, Prompt
from orchestrator.api.logprobs import ToldToken, chat_logprobs
from orchestrator.api.parameters import TokenLimit, checked_num_logprobs
from orchestrator.api.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Usage,
)
from orchestrator.api.tokenizing import encode_chat
from orchestrator.request import FinishReason, ServedModel
from orchestrator.tokenizer import Tokenizer

ChatPiece = Piece[ChatLogprobs]


class Chat(Dialect[ChatRequest, ChatLogprobs]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"

    async def prompts(self, request: ChatRequest, tokenizer: Tokenizer, model: ServedModel) -> list[Prompt]:
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
        return [Prompt("messages", await encode_chat(tokenizer, messages, add_generation_prompt, variables), None)]

    def limit(self, request: ChatRequest) -> TokenLimit:
        if request.max_completion_tokens is not None:
            return TokenLimit("max_completion_tokens", request.max_completion_tokens, None)
        return TokenLimit("max_tokens", request.max_tokens, None)

    def num_logprobs(self, request: ChatRequest) -> int | None:
        num_top = checked_num_logprobs("top_logprobs", request.top_logprobs or 0)
        if num_top and not request.logprobs:
            raise invalid(f"top_logprobs {num_top}: logprobs must be true with it", "top_logprobs")
        return num_top if request.logprobs else None

    def is_echoed(self, request: ChatRequest) -> bool:
        return False

    def logprobs(self, tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> ChatLogprobs:
        return chat_logprobs(tokens, tokenizer)

    def answer(self, head: AnswerHead, choices: Sequence[tuple[ChatPiece, Generation]], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[
                ChatChoice(
                    index=piece.index,
                    message=ChatMessage(content=piece.text),
                    logprobs=piece.logprobs,
                    finish_reason=generation.finish_reason or FinishReason.STOP,
                    stop_reason=generation.stop_reason,
                )
                for piece, generation in choices
            ],
            usage=usage,
        )

    def first_events(self, head: AnswerHead, index: int, usage: Usage | None) -> bytes:
        return _chunk_event(head, ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")), usage)

    def text_event(self, head: AnswerHead, piece: ChatPiece) -> bytes:
        choice = ChatChunkChoice(index=piece.index, delta=ChatDelta(content=piece.text), logprobs=piece.logprobs)
        return _chunk_event(head, choice, piece.usage)

    def last_events(self, head: AnswerHead, piece: ChatPiece, generation: Generation) -> bytes:
        rest = self.text_event(head, piece) if piece.text or piece.logprobs is not None else b""
        end = ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(),
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
        )
        return rest + _chunk_event(head, end, piece.usage)

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
