"""POST /tokenize and /detokenize: what a text is in the model's tokens, and back."""

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.body import decode_body, read_body
from orchestrator.api.chat import Chat
from orchestrator.api.endpoint import Service
from orchestrator.api.errors import invalid
from orchestrator.api.parameters import check_model, token_ids
from orchestrator.api.responses import json_response
from orchestrator.api.schema import ChatRequest, Detokenized, DetokenizeRequest, TokenizeRequest, Tokens
from orchestrator.api.tokenizing import MAX_CHARS_ON_THE_LOOP, encode_all
from orchestrator.request import ServedModel
from orchestrator.tokenizer import Tokenizer

T = TypeVar("T", TokenizeRequest, DetokenizeRequest)


class TokenRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt, or of messages as the model's chat template writes them."""
        asked, model, tokenizer = await self._begin(request, self._tokenize)
        ids = await _encode(asked, tokenizer, model)
        strings = [tokenizer.token_bytes(id).decode(errors="replace") for id in ids] if asked.return_token_strs else None
        return json_response(Tokens(count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=strings))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens by their names."""
        asked, model, tokenizer = await self._begin(request, self._detokenize)
        if asked.tokens is None:
            raise invalid("tokens: must be given", "tokens", "missing_required_parameter")
        ids = token_ids(asked.tokens, "tokens", model)
        if len(ids) <= MAX_CHARS_ON_THE_LOOP:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        else:
            text = await asyncio.to_thread(tokenizer.decode, ids, False)
        return json_response(Detokenized(prompt=text))

    async def _begin(self, request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[T, ServedModel, Tokenizer]:
        """What is asked, of which model, and its tokenizer."""
        asked = decode_body(decoder, await read_body(request.scope, request.receive, self._service.config.max_body_bytes))
        model, tokenizer = self._service.require_model()
        check_model(asked.model, model)
        return asked, model, tokenizer


async def _encode(asked: TokenizeRequest, tokenizer: Tokenizer, model: ServedModel) -> list[int]:
    if asked.messages is None and asked.prompt is None:
        raise invalid("prompt: it or messages must be given", "prompt", "missing_required_parameter")
    if asked.prompt is not None:
        if asked.messages is not None:
            raise invalid("messages: must not be given beside prompt", "messages")
        [ids] = await encode_all(tokenizer, [asked.prompt], asked.add_special_tokens is not False)
        return ids
    chat = ChatRequest(
        messages=asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    [prompt] = await Chat().prompts(chat, tokenizer, model)
    return prompt.token_ids
