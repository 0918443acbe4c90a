import pytest
import torch

from marlaas_worker.rollout.adapter_groups import MIN_RUN, add_adapters, group_rows, stacked_adapters

RANK, INPUTS, WIDTHS, SLOTS = 3, 5, (4, 2), 12


def _stacked():
    torch.manual_seed(0)
    a = [torch.randn(SLOTS, 1, RANK, INPUTS) for _ in WIDTHS]
    b = [torch.randn(SLOTS, 1, width, RANK) for width in WIDTHS]
    return a, b


@pytest.mark.parametrize(
    "slots",
    [
        [0, 0, 0, 0],
        [2, 2, 0, 0],
        [0, 1, 0, 2],
        [-1, 1, -1, 1],
        [-1, -1, -1, -1],
        [3, -1, 0, 1],
        [11, -1, 0, 11],
        [3, -1, 0, 3, 3] * 8,
        [0, 3] * 24,
        [-1] * 3 + [4] * MIN_RUN + [1, 4, -1] + [1] * MIN_RUN + [0],
        [4] * MIN_RUN + [2, 2] + [4] * MIN_RUN,
    ],
)
def test_every_row_gets_its_own_adapter_and_rows_without_one_get_nothing(slots):
    a, b = _stacked()
    inputs, outputs = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))
    expected = outputs.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            deltas = [b_part[slot, 0] @ (a_part[slot, 0] @ inputs[row]) for a_part, b_part in zip(a, b, strict=True)]
            expected[row] += torch.cat(deltas)
    add_adapters(outputs, inputs, group_rows(torch.tensor(slots)), stacked_adapters(a, b))
    torch.testing.assert_close(outputs, expected)


def test_an_adapter_whose_products_overflow_changes_no_other_row():
    a, b = _stacked()
    a[0][1], a[1][1] = 1e38, -1e38
    inputs, outputs = torch.full((4, INPUTS), 9.0), torch.zeros(4, sum(WIDTHS))
    add_adapters(outputs, inputs, group_rows(torch.tensor([0, 1, 2, -1])), stacked_adapters(a, b))
    assert not outputs[1].isfinite().all()
    assert outputs[[0, 2, 3]].isfinite().all()
    assert not outputs[3].any()


def test_the_tensors_of_vllm_keep_their_values_and_what_is_written_to_them_later_is_applied():
    a, b = _stacked()
    before = [tensor.clone() for tensor in (*a, *b)]
    adapters = stacked_adapters(a, b)
    assert all(torch.equal(now, then) for now, then in zip((*a, *b), before, strict=True))
    assert adapters.a[2:5].is_contiguous()
    assert adapters.b[0][2:5].is_contiguous()
    a[0][2, 0], b[0][2, 0] = torch.ones(RANK, INPUTS), torch.ones(WIDTHS[0], RANK)
    b[1][2] = 0
    outputs = torch.zeros(2, sum(WIDTHS))
    add_adapters(outputs, torch.ones(2, INPUTS), group_rows(torch.tensor([2, 1])), adapters)
    assert outputs[0].tolist() == [RANK * INPUTS] * WIDTHS[0] + [0] * WIDTHS[1]


def test_rows_are_computed_in_runs_sorted_by_slot_or_side_by_side():
    run = [5] * MIN_RUN
    rows = group_rows(torch.tensor([1, -1, *run, 1, 0, 5]))
    assert (rows.runs, rows.sorted) == ([(5, slice(2, 2 + MIN_RUN))], ())
    assert rows.mixed.rows.tolist() == [0, MIN_RUN + 2, MIN_RUN + 3, MIN_RUN + 4]
    assert rows.mixed.slots == slice(0, 6)
    assert rows.mixed.foreign[:, :, 0].logical_not().nonzero().tolist() == [[0, 1], [1, 1], [2, 0], [3, 5]]
    assert group_rows(torch.tensor([0, 20])).mixed.slots.tolist() == [0, 20]
    assert group_rows(torch.tensor([0, 20])).mixed.rows is None
    assert group_rows(torch.tensor([-1, 3, 3])).runs == [(3, slice(1, 3))]
    assert [(slot, places.tolist()) for slot, places in group_rows(torch.tensor([3, -1, 3])).sorted] == [(3, [0, 2])]
    assert [slot for slot, _ in group_rows(torch.tensor([1, 0] * 10)).sorted] == [0, 1]
