"""Tokenizing that does not hold up the streams of others."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.tokenizer import Tokenizer

# Below this a thread costs more than the work: tokenizing takes about 1 ms per 10,000 characters.
MAX_CHARS_ON_THE_LOOP = 10_000
CHARS_A_MESSAGE_IS_WORTH = 50  # a template takes some 5 µs for each


async def encode_all(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    return encode() if sum(map(len, texts)) <= MAX_CHARS_ON_THE_LOOP else await asyncio.to_thread(encode)


async def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
) -> list[int]:
    def render_and_encode() -> list[int]:
        text = tokenizer.render_chat_template(messages, add_generation_prompt, **variables)
        return tokenizer.encode(text, add_special_tokens=False)

    num_chars = sum(len(message["content"] or "") + CHARS_A_MESSAGE_IS_WORTH for message in messages)
    if num_chars <= MAX_CHARS_ON_THE_LOOP:
        return render_and_encode()
    return await asyncio.to_thread(render_and_encode)
