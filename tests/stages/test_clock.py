"""A device's clock on the host's."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.clock import MAX_DRIFT, HostClock

US = 1000
MS = 1_000_000
SECOND = 1_000_000_000
ZERO = 77 * SECOND  # of the device's clock, against the host's


def device_time(host_ns: int, drift: float) -> int:
    return ZERO + round(host_ns * (1 + drift))


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_a_drifting_clock_is_followed(drift: float) -> None:
    clock, chance = HostClock(), random.Random(5)
    errors: list[int] = []
    for true_ns in range(SECOND, 60 * SECOND, 3 * MS):
        lag_ns = chance.choice((2 * US, 5 * US, 60 * US, 20 * MS))
        errors.append(clock.place(device_time(true_ns, drift), true_ns + lag_ns) - true_ns)
    settled = errors[1000:]
    assert max(settled) <= 30 * US
    assert min(settled) >= -30 * US


def test_a_point_that_is_looked_at_late_was_not_reached_late() -> None:
    clock = HostClock()
    clock.place(device_time(SECOND, 0), SECOND + 2 * US)
    for true_ns in range(SECOND + MS, 3 * SECOND, MS):
        assert abs(clock.place(device_time(true_ns, 0), true_ns + 50 * MS) - true_ns) <= 2 * US + 2 * SECOND * MAX_DRIFT


def test_after_an_hour_without_a_look_the_first_one_counts() -> None:
    clock, drift = HostClock(), 4e-5
    for true_ns in range(SECOND, 2 * SECOND, MS):
        clock.place(device_time(true_ns, drift), true_ns + 2 * US)
    for direction in (drift, -drift):
        true_ns = 3600 * SECOND
        clock = HostClock()
        clock.place(device_time(SECOND, direction), SECOND + 2 * US)
        assert 0 <= clock.place(device_time(true_ns, direction), true_ns + 3 * US) - true_ns <= 3 * US
        later_ns = true_ns + MS
        assert abs(clock.place(device_time(later_ns, direction), later_ns + 40 * US) - later_ns) <= 5 * US


def test_a_late_first_look_is_corrected_by_the_first_prompt_one() -> None:
    clock = HostClock()
    start = clock.place(device_time(SECOND, 0), SECOND + 50 * MS)
    assert start == SECOND + 50 * MS  # nothing better was known
    end = clock.place(device_time(SECOND + 50 * MS, 0), SECOND + 50 * MS + US)
    assert start <= end <= SECOND + 50 * MS + US
    later_ns = SECOND + 60 * MS
    assert abs(clock.place(device_time(later_ns, 0), later_ns + 10 * US) - later_ns) <= US


@given(
    st.lists(st.tuples(st.integers(1, 500 * MS), st.integers(0, 30 * MS)), min_size=2, max_size=60),
    st.floats(-9e-5, 9e-5),
    st.randoms(use_true_random=False),
)
def test_no_later_time_is_placed_before_an_earlier_one(
    looks: list[tuple[int, int]], drift: float, chance: random.Random
) -> None:
    """In whatever order they are asked for, and however late they were seen."""
    true_ns, seen_ns, asked = SECOND, 0, list[tuple[int, int]]()
    for gap_ns, lag_ns in looks:
        true_ns += gap_ns
        seen_ns = max(seen_ns, true_ns + lag_ns)
        asked.append((device_time(true_ns, drift), seen_ns))
    clock = HostClock()
    placed: dict[int, int] = {}
    while asked:
        at_once, asked = asked[:8], asked[8:]  # older ones are asked for while newer are, not forever
        chance.shuffle(at_once)
        for device_ns, seen in at_once:
            placed[device_ns] = clock.place(device_ns, seen)
    times = [placed[device_ns] for device_ns in sorted(placed)]
    assert times == sorted(times)
