"""The tokens of penalised sequences, on the device that samples, and the penalties that follow from them.

The definition is vLLM's. For a token that is in the prompt or was generated, a positive logit is divided by the repetition
penalty and any other multiplied by it. Then the frequency penalty is subtracted once for each time that the token was
generated, and the presence penalty once if it was generated at all.
"""

from collections.abc import Sequence

import torch

from stages.plan import RowSampling
from stages.upload import CPU, upload


class TokenHistory:
    """Which token each of ``num_slots`` sequence slots has at each position, for slots that are penalised.

    Sampled tokens are stored by the position that the plan gives them, in stream order: nothing waits for the host to have
    seen them. ``table [num_slots, max_len]`` int32. What is left of a slot's former owners lies past the tokens of its own.
    """

    def __init__(self, num_slots: int, max_len: int, device: torch.device = CPU) -> None:
        self.table = torch.zeros(num_slots, max_len, dtype=torch.int32, device=device)  # on a CPU taken when first written

    def store_prompt(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """The tokens of a prefill chunk, which after a preemption may have been generated."""
        self.table[slot, start : start + len(token_ids)] = upload(token_ids, torch.int32, self.table.device)

    def store_sampled(self, slots: Sequence[int], positions: Sequence[int], token_ids: torch.Tensor) -> None:
        """``token_ids [n]`` int64, each at its slot's position. Of a sequence's last position there may be no place: it is the
        end."""
        max_len = self.table.shape[1]
        index = [slot * max_len + min(at, max_len - 1) for slot, at in zip(slots, positions, strict=True)]
        where = upload(index, torch.int64, self.table.device)
        self.table.view(-1).index_copy_(0, where, token_ids.to(torch.int32))

    def penalise(
        self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int], samplings: Sequence[RowSampling]
    ) -> None:
        """Change ``logits [n, vocab]`` float32, of the tokens at ``positions``, in place.

        Only logits of tokens in the history are touched. A token that is there several times is written several times with
        one value, or has one value subtracted several times, so that the order of writes does not matter.
        """
        device, length = logits.device, max(positions)

        def column(values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return upload(values, dtype, device)[:, None]

        tokens = self.table[upload(slots, torch.int64, device), :length].to(torch.int64)
        places = torch.arange(length, device=device)
        ends = column(positions, torch.int64)
        # What lies past a row's end is replaced by its first token, which is in its prompt.
        tokens = torch.where(places < ends, tokens, tokens[:, :1])
        if any(s.repetition_penalty != 1 for s in samplings):
            penalties = column([s.repetition_penalty for s in samplings], torch.float32)
            values = logits.gather(1, tokens)
            logits.scatter_(1, tokens, torch.where(values > 0, values / penalties, values * penalties))
        if all(s.frequency_penalty == 0 and s.presence_penalty == 0 for s in samplings):
            return
        num_prompt = [s.num_prompt_tokens for s in samplings]
        is_generated = (places >= column(num_prompt, torch.int64)) & (places < ends)
        penalties = column([s.frequency_penalty for s in samplings], torch.float32)
        logits.scatter_add_(1, tokens, -penalties * is_generated)
        # Places that hold nothing generated stand for the first generated token, or, when there is none, cost nothing.
        first = tokens.gather(1, column([min(n, length - 1) for n in num_prompt], torch.int64))
        generated = torch.where(is_generated, tokens, first)
        penalties = column(
            [s.presence_penalty if at > n else 0.0 for s, n, at in zip(samplings, num_prompt, positions, strict=True)],
            torch.float32,
        )
        logits.scatter_(1, generated, logits.gather(1, generated) - penalties)
