"""Log-probabilities as the two routes write them."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.api.schema import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs
from orchestrator.tokenizer import Tokenizer
from stages.plan import TokenLogprobs

LEAST_LOGPROB = -9999.0  # written for minus infinity, which JSON does not have


@dataclass(frozen=True)
class ToldToken:
    """A token whose log-probabilities are told; ``offset`` is where its text begins in the choice's text.

    ``logprobs`` is None for the first token of a prompt: nothing comes before it.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


def completion_logprobs(tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    texts = [_text_or_bytes(tokenizer.token_bytes(token.token_id)) for token in tokens]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens],
        top_logprobs=[
            None if token.logprobs is None else _named_logprobs(text, token.logprobs, tokenizer)
            for text, token in zip(texts, tokens, strict=True)
        ],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(
        content=[_chat_token(token.token_id, token.logprobs, tokenizer) for token in tokens if token.logprobs is not None]
    )


def _named_logprobs(own: str, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most probable tokens, best first, and the token itself. Of several that read alike the best one is told."""
    found: dict[str, float] = {}
    for token_id, value in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
        found.setdefault(_text_or_bytes(tokenizer.token_bytes(token_id)), _finite(value))
    found.setdefault(own, _finite(logprobs.logprob))
    return found


def _chat_token(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> ChatTokenLogprob:
    data = tokenizer.token_bytes(token_id)
    top: list[ChatTopLogprob] = []
    for top_id, value in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
        top_data = tokenizer.token_bytes(top_id)
        top.append(ChatTopLogprob(token=_text(top_data), logprob=_finite(value), bytes=list(top_data)))
    return ChatTokenLogprob(token=_text(data), logprob=_finite(logprobs.logprob), bytes=list(data), top_logprobs=top)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _text_or_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
