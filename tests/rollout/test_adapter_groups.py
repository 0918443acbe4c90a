import pytest
import torch

from marlaas_worker.rollout.adapter_groups import add_adapters, group_rows, stacked_adapters

RANK, INPUTS, WIDTHS, SLOTS = 3, 5, (4, 2), 12


def _stacked():
    torch.manual_seed(0)
    a = [torch.randn(SLOTS, 1, RANK, INPUTS) for _ in WIDTHS]
    b = [torch.randn(SLOTS, 1, width, RANK) for width in WIDTHS]
    return a, b


@pytest.mark.parametrize(
    ("slots", "is_mixed"),
    [
        ([0, 0, 0, 0], False),
        ([2, 2, 0, 0], True),
        ([0, 1, 0, 2], True),
        ([-1, 1, -1, 1], False),
        ([-1, -1, -1, -1], False),
        ([3, -1, 0, 1], True),
        ([11, -1, 0, 11], True),
        ([3, -1, 0, 3, 3] * 8, False),
    ],
)
def test_every_row_gets_its_own_adapter_and_rows_without_one_get_nothing(slots, is_mixed):
    a, b = _stacked()
    inputs, outputs = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))
    expected = outputs.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            deltas = [b_part[slot, 0] @ (a_part[slot, 0] @ inputs[row]) for a_part, b_part in zip(a, b, strict=True)]
            expected[row] += torch.cat(deltas)
    rows = group_rows(torch.tensor(slots))
    assert rows.is_mixed == is_mixed
    add_adapters(outputs, inputs, rows, stacked_adapters(a, b))
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
    before = b[0].clone()
    adapters = stacked_adapters(a, b)
    assert torch.equal(b[0], before)
    assert adapters.parts[0][1].is_contiguous()
    a[0][2, 0], b[0][2, 0] = torch.ones(RANK, INPUTS), torch.ones(WIDTHS[0], RANK)
    b[1][2] = 0
    outputs = torch.zeros(2, sum(WIDTHS))
    add_adapters(outputs, torch.ones(2, INPUTS), group_rows(torch.tensor([2, 1])), adapters)
    assert outputs[0].tolist() == [RANK * INPUTS] * WIDTHS[0] + [0] * WIDTHS[1]


def test_rows_are_sorted_by_slot_and_those_without_an_adapter_left_out():
    rows = group_rows(torch.tensor([1, -1, 1, 0, 5, 0]))
    assert rows.groups == [(0, slice(0, 2)), (1, slice(2, 4)), (5, slice(4, 5))]
    assert rows.order.tolist() == [3, 5, 0, 2, 4]
    assert rows.places.tolist() == [2, 5, 3, 0, 4, 1]
    assert rows.slots == slice(0, 6)
    assert group_rows(torch.tensor([2, 2, 7])).order is None
    assert group_rows(torch.tensor([0, 20])).slots.tolist() == [0, 20]
