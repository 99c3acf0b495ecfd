"""POST /v1/completions."""

from typing import Any, cast

import msgspec

from orchestrator.api.dialect import AnswerHead, Dialect
from orchestrator.api.errors import invalid
from orchestrator.api.events import event
from orchestrator.api.generation import Generation
from orchestrator.api.parameters import token_ids
from orchestrator.api.schema import Completion, CompletionChoice, CompletionRequest, Usage
from orchestrator.api.tokenizing import encode
from orchestrator.request import ServedModel
from orchestrator.tokenizer import Tokenizer


class Completions(Dialect[CompletionRequest]):
    request_type = CompletionRequest
    id_prefix = "cmpl-"
    prompt_field = "prompt"
    default_max_tokens = 16

    async def prompt_token_ids(self, request: CompletionRequest, tokenizer: Tokenizer, model: ServedModel) -> list[int]:
        prompt = _the_one_prompt(request.prompt)
        found = await encode(tokenizer, prompt) if isinstance(prompt, str) else token_ids(prompt, "prompt", model)
        if not found:
            raise invalid("prompt: must have at least one token", "prompt")
        return found

    def limit(self, request: CompletionRequest) -> tuple[str, int | None]:
        return "max_tokens", request.max_tokens

    def answer(self, head: AnswerHead, text: str, generation: Generation) -> Completion:
        return _completion(head, _last_choice(text, generation), generation.usage)

    def first_events(self, head: AnswerHead) -> bytes:
        return b""

    def text_event(self, head: AnswerHead, text: str, usage: Usage | None) -> bytes:
        return event(_completion(head, CompletionChoice(text=text, finish_reason=None), usage))

    def last_events(self, head: AnswerHead, text: str, generation: Generation, usage: Usage | None) -> bytes:
        return event(_completion(head, _last_choice(text, generation), usage))

    def usage_event(self, head: AnswerHead, usage: Usage) -> bytes:
        return event(_completion(head, None, usage))


def _last_choice(text: str, generation: Generation) -> CompletionChoice:
    return CompletionChoice(text=text, finish_reason=generation.finish_reason, stop_reason=generation.stop_reason)


def _completion(head: AnswerHead, choice: CompletionChoice | None, usage: Usage | None) -> Completion:
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[] if choice is None else [choice],
        usage=msgspec.UNSET if usage is None else usage,
    )


def _the_one_prompt(prompt: str | list[Any] | None) -> str | list[Any]:
    """Text or a list of token ids."""
    if prompt is None:
        raise invalid("prompt: must be given", "prompt", "missing_required_parameter")
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], (str, list)):
        return prompt
    if len(prompt) > 1:
        raise invalid(
            f"prompt: {len(prompt)} prompts given, this server takes one per request", "prompt", "unsupported_parameter"
        )
    return cast("str | list[Any]", prompt[0])
