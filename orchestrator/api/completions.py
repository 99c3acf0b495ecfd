"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from orchestrator.api.dialect import AnswerHead, Dialect, Piece
from orchestrator.api.errors import invalid
from orchestrator.api.events import event
from orchestrator.api.generation import Generation, Prompt
from orchestrator.api.logprobs import ToldToken, completion_logprobs
from orchestrator.api.parameters import TokenLimit, checked_num_logprobs, token_ids
from orchestrator.api.schema import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from orchestrator.api.tokenizing import encode_all
from orchestrator.request import ServedModel
from orchestrator.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16

CompletionPiece = Piece[CompletionLogprobs]


class Completions(Dialect[CompletionRequest, CompletionLogprobs]):
    request_type = CompletionRequest
    id_prefix = "cmpl-"

    async def prompts(self, request: CompletionRequest, tokenizer: Tokenizer, model: ServedModel) -> list[Prompt]:
        given = _given_prompts(request.prompt)
        encoded = iter(await encode_all(tokenizer, [prompt for prompt in given if isinstance(prompt, str)]))
        prompts: list[Prompt] = []
        for number, prompt in enumerate(given):
            field = "prompt" if len(given) == 1 else f"prompt[{number}]"
            is_text = isinstance(prompt, str)
            ids = next(encoded) if is_text else token_ids(prompt, field, model)
            if not ids:
                raise invalid(f"{field}: must have at least one token", field)
            prompts.append(Prompt(field, ids, prompt if is_text else None))
        return prompts

    def limit(self, request: CompletionRequest) -> TokenLimit:
        return TokenLimit("max_tokens", request.max_tokens, DEFAULT_MAX_TOKENS, least=0 if request.echo else 1)

    def num_logprobs(self, request: CompletionRequest) -> int | None:
        if request.logprobs is None or request.logprobs is False:  # 0 asks for those of the tokens themselves
            return None
        return checked_num_logprobs("logprobs", int(request.logprobs))

    def is_echoed(self, request: CompletionRequest) -> bool:
        return bool(request.echo)

    def logprobs(self, tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> CompletionLogprobs:
        return completion_logprobs(tokens, tokenizer)

    def answer(self, head: AnswerHead, choices: Sequence[tuple[CompletionPiece, Generation]], usage: Usage) -> Completion:
        return _completion(head, [_last_choice(piece, generation) for piece, generation in choices], usage)

    def first_events(self, head: AnswerHead, index: int, usage: Usage | None) -> bytes:
        return b""

    def text_event(self, head: AnswerHead, piece: CompletionPiece) -> bytes:
        choice = CompletionChoice(index=piece.index, text=piece.text, logprobs=piece.logprobs, finish_reason=None)
        return event(_completion(head, [choice], piece.usage))

    def last_events(self, head: AnswerHead, piece: CompletionPiece, generation: Generation) -> bytes:
        return event(_completion(head, [_last_choice(piece, generation)], piece.usage))

    def usage_event(self, head: AnswerHead, usage: Usage) -> bytes:
        return event(_completion(head, [], usage))


def _last_choice(piece: CompletionPiece, generation: Generation) -> CompletionChoice:
    return CompletionChoice(
        index=piece.index,
        text=piece.text,
        logprobs=piece.logprobs,
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
    )


def _completion(head: AnswerHead, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=msgspec.UNSET if usage is None else usage,
    )


def _given_prompts(prompt: str | list[Any] | None) -> list[str | list[Any]]:
    """Each is text or a list of what should be token ids."""
    if prompt is None:
        raise invalid("prompt: must be given", "prompt", "missing_required_parameter")
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], (str, list)):
        return [prompt]
    for number, one in enumerate(prompt):
        if not isinstance(one, (str, list)):
            raise invalid(f"prompt[{number}]: must be text or a list of token ids, as the ones before it", f"prompt[{number}]")
    return cast("list[str | list[Any]]", prompt)
