import threading

import pytest
import torch

from stages.plan import PlanRow, RowKind
from stages.slots import SlotTable


def row(slot: int, generation: int = 0) -> PlanRow:
    return PlanRow(slot, generation, RowKind.DECODE, 5, 1, [], [], None, True)


def scatter(
    slots: SlotTable, rows: list[PlanRow], ids: list[list[int]], sampled: list[int], rejected: list[int] | None = None
) -> int:
    counts = torch.tensor(sampled, dtype=torch.int32)
    dropped = torch.tensor(rejected or [0] * len(rows), dtype=torch.int32)
    return slots.scatter(rows, torch.tensor(ids, dtype=torch.int64).view(len(rows), -1), counts, dropped)


def test_one_token_a_row_becomes_the_next_input() -> None:
    slots = SlotTable(4, 1)
    slots.open(1, 0)
    slots.open(3, 0)
    slots.positions[torch.tensor([1, 3])] = torch.tensor([6, 9])
    assert scatter(slots, [row(3), row(1)], [[30], [10]], [1, 1]) == 0
    assert slots.last_tokens.flatten().tolist() == [-1, 10, -1, 30]
    assert slots.positions.tolist() == [0, 7, 0, 10]


def test_several_tokens_are_kept_newest_first_and_advance_the_position() -> None:
    slots = SlotTable(4, 3)
    for slot in range(4):
        slots.open(slot, 0)
    rows = [row(slot) for slot in range(4)]
    ids = [[1, 2, 3], [4, 5, -1], [6, -1, -1], [-1, -1, -1]]
    assert scatter(slots, rows, ids, [3, 2, 1, 0], [0, 1, 2, 0]) == 0
    assert slots.last_tokens.tolist() == [[3, 2, 1], [5, 4, -1], [6, -1, -1], [-1, -1, -1]]
    assert slots.positions.tolist() == [3, 2, 1, 0]


def test_a_message_narrower_than_the_table() -> None:
    slots = SlotTable(1, 3)
    slots.open(0, 0)
    scatter(slots, [row(0)], [[7, 8]], [2])
    assert slots.last_tokens.tolist() == [[8, 7, -1]]


def test_rows_of_a_generation_that_is_not_current_are_dropped_and_counted() -> None:
    slots = SlotTable(3, 1)
    slots.open(0, 0)
    slots.open(1, 0)
    slots.free(1, 0)
    slots.open(1, 1)
    slots.open(2, 4)
    slots.free(2, 4)
    assert scatter(slots, [row(0), row(1, 0), row(2, 4)], [[5], [6], [7]], [1, 1, 1]) == 2
    assert slots.last_tokens.flatten().tolist() == [5, -1, -1]
    assert slots.positions.tolist() == [1, 0, 0]
    assert slots.num_stale_rows == 2


def test_a_row_without_a_token_keeps_its_state() -> None:
    slots = SlotTable(1, 2)
    slots.open(0, 0)
    scatter(slots, [row(0)], [[3, 4]], [2])
    scatter(slots, [row(0)], [[9, 9]], [0])
    assert slots.last_tokens.tolist() == [[4, 3]]
    assert slots.positions.tolist() == [2]


@pytest.mark.parametrize(("count", "advance"), [(2**31 - 1, 2), (3, 2), (-1, 0), (-(2**31), 0)])
def test_a_damaged_count_writes_nowhere_else(count: int, advance: int) -> None:
    slots = SlotTable(2, 2)
    slots.open(0, 0)
    scatter(slots, [row(0)], [[3, 4]], [count])
    assert slots.positions.tolist() == [advance, 0]
    assert slots.last_tokens[1].tolist() == [-1, -1]


def test_a_message_that_does_not_fit_its_rows_is_refused() -> None:
    slots = SlotTable(2, 1)
    slots.open(0, 0)
    with pytest.raises(ValueError, match="for 1 rows of at most 1"):
        scatter(slots, [row(0)], [[1, 2]], [1])
    with pytest.raises(ValueError, match="slot 2: must be between 0 and 1"):
        scatter(slots, [row(2)], [[1]], [1])
    with pytest.raises(ValueError, match="slot -1"):
        scatter(slots, [row(-1)], [[1]], [1])
    with pytest.raises(ValueError, match="for 2 rows"):
        slots.scatter([row(0), row(0)], torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), torch.zeros(1))


def test_no_rows() -> None:
    slots = SlotTable(2, 1)
    empty = torch.empty(0, dtype=torch.int32)
    assert slots.scatter([], torch.empty(0, 1, dtype=torch.int64), empty, empty) == 0


def test_a_slot_has_one_generation_at_a_time_and_never_an_old_one() -> None:
    slots = SlotTable(2, 1)
    slots.open(0, 3)
    with pytest.raises(ValueError, match="slot 0: still belongs to generation 3"):
        slots.open(0, 4)
    with pytest.raises(ValueError, match="generation 2 cannot be freed"):
        slots.free(0, 2)
    slots.free(0, 3)
    assert not slots.is_current(0, 3)
    with pytest.raises(ValueError, match="cannot be freed"):
        slots.free(0, 3)
    with pytest.raises(ValueError, match="generation 3 is not newer than 3"):
        slots.open(0, 3)
    slots.open(0, 4)
    assert slots.is_current(0, 4)
    with pytest.raises(ValueError, match="slot 2"):
        slots.open(2, 0)


def test_a_scatter_beside_free_and_open_never_writes_a_newer_generation() -> None:
    num_generations = 300
    slots = SlotTable(1, 1)
    slots.open(0, 0)
    failures: list[str] = []
    go, done = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)

    def receive() -> None:
        for generation in range(num_generations):
            go.wait()
            scatter(slots, [row(0, generation)], [[generation]], [1])
            done.wait()

    receiver = threading.Thread(target=receive)
    receiver.start()
    for generation in range(num_generations):
        go.wait()
        slots.free(0, generation)
        before = slots.last_tokens[0, 0].item()  # freed: what is there now may not change any more
        slots.open(0, generation + 1)
        done.wait()
        if slots.last_tokens[0, 0].item() != before:
            failures.append(f"generation {generation} wrote into {generation + 1}")
    receiver.join()
    assert not failures
    assert 0 <= slots.num_stale_rows <= num_generations
