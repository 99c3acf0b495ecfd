"""How long a step may take before its ranks are taken for lost: learned from what steps took. No clock, no I/O."""

from collections.abc import Sequence

FACTOR = 4.0  # a step may take so many times what was measured: contexts grow, and others use the machine
FORGET = 0.98  # a measurement counts for less with every step of its size that was quicker


class Patience:
    """Knows what steps of each size took on each stage; sizes are told apart by powers of two."""

    def __init__(self, num_stages: int, step_timeout_seconds: float) -> None:
        self._step_timeout_seconds = step_timeout_seconds
        self._seconds: list[dict[int, float]] = [{} for _ in range(num_stages)]

    def learn(self, stage: int, num_tokens: int, seconds: float) -> None:
        """A stage's forward of ``num_tokens`` took ``seconds``."""
        size = num_tokens.bit_length()
        known = self._seconds[stage]
        known[size] = max(seconds, known.get(size, 0.0) * FORGET)

    def expected_seconds(self, stage: int, num_tokens: int) -> float:
        """What a step of this size took before, or, if none did, one of the nearest size, scaled up but never down. 0 when
        nothing is known."""
        known = self._seconds[stage]
        size = num_tokens.bit_length()
        if size in known or not known:
            return known.get(size, 0.0)
        nearest = min(known, key=lambda other: (abs(other - size), -other))
        return known[nearest] * 2 ** max(size - nearest, 0)

    def allowed_seconds(self, steps: Sequence[int]) -> float:
        """How long the ranks may go without progress on ``steps``, the numbers of tokens of those under way: --step-timeout, or
        longer when these take longer. A long prefill does, and what waits behind it."""
        stages = range(len(self._seconds))
        expected = sum(self.expected_seconds(stage, num_tokens) for num_tokens in steps for stage in stages)
        return max(self._step_timeout_seconds, FACTOR * expected)
