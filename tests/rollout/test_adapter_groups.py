import pytest
import torch
from tests.tables import rows

from marlaas_worker.rollout.adapter_groups import add_adapters, group_rows, stacked_adapters

RANK, INPUTS, WIDTHS, SLOTS = 3, 5, (4, 2), 12


def _stacked(rank=RANK, dtype=torch.float32):
    torch.manual_seed(0)
    a = [torch.randn(SLOTS, 1, rank, INPUTS).to(dtype) for _ in WIDTHS]
    b = [torch.randn(SLOTS, 1, width, rank).to(dtype) for width in WIDTHS]
    return a, b


@pytest.mark.parametrize("slots", rows(__file__, "slots_of_rows"))
def test_every_row_gets_its_own_adapter_and_rows_without_one_get_nothing(slots):
    slots = [slot for slot, number in slots for _ in range(number)]
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
    assert (adapters.a.is_contiguous(), adapters.b.is_contiguous()) == (True, True)
    a[0][2, 0], b[0][2, 0] = torch.ones(RANK, INPUTS), torch.ones(WIDTHS[0], RANK)
    b[1][2] = 0
    outputs = torch.zeros(2, sum(WIDTHS))
    add_adapters(outputs, torch.ones(2, INPUTS), group_rows(torch.tensor([2, 1])), adapters)
    assert outputs[0].tolist() == [RANK * INPUTS] * WIDTHS[0] + [0] * WIDTHS[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [3, 8])
def test_the_result_of_a_row_does_not_depend_on_the_other_rows_of_a_batch(dtype, rank):
    adapters = stacked_adapters(*_stacked(rank, dtype))
    slots = [3, 0, 3, -1, 7, *[7] * 7]
    inputs, outputs = torch.randn(len(slots), INPUTS).to(dtype), torch.randn(len(slots), sum(WIDTHS)).to(dtype)
    alone = outputs.clone()
    for row, slot in enumerate(slots):
        add_adapters(alone[row : row + 1], inputs[row : row + 1], group_rows(torch.tensor([slot])), adapters)
    add_adapters(outputs, inputs, group_rows(torch.tensor(slots)), adapters)
    assert torch.equal(outputs, alone)


@pytest.mark.parametrize("rank", [3, 8])
def test_bfloat16_is_rounded_after_each_product_and_after_the_sum(rank):
    a, b = _stacked(rank, torch.bfloat16)
    slots = [0, 5, 5, 11]
    inputs, outputs = torch.randn(4, INPUTS).bfloat16(), torch.randn(4, sum(WIDTHS)).bfloat16()
    expected = outputs.clone()
    for row, slot in enumerate(slots):
        hidden = [(part[slot, 0].double() @ inputs[row].double()).bfloat16() for part in a]
        deltas = [(part[slot, 0].double() @ one.double()).bfloat16() for part, one in zip(b, hidden, strict=True)]
        expected[row] += torch.cat(deltas)
    add_adapters(outputs, inputs, group_rows(torch.tensor(slots)), stacked_adapters(a, b))
    assert torch.equal(outputs, expected)


def test_bfloat16_rounds_ties_to_even_and_keeps_infinite_values():
    a, b = [torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)], [torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)]
    ulp = 2.0**-7
    a[0][0, 0] = torch.tensor([[1, ulp / 2], [1 + ulp, ulp / 2], [3e38, 3e38], [1, 1]])
    b[0][0, 0] = torch.eye(4)
    b[0][0, 0, 3, 3] = 0
    outputs = torch.zeros(1, 4, dtype=torch.bfloat16)
    inputs = torch.ones(1, 2, dtype=torch.bfloat16)
    adapters = stacked_adapters(a, b)
    add_adapters(outputs, inputs, group_rows(torch.tensor([0])), adapters)
    assert outputs[0, 0].isnan()  # infinite times 0, as in any product with this adapter
    a[0][0, 0, 2] = 0
    outputs.zero_()
    add_adapters(outputs, inputs, group_rows(torch.tensor([0])), adapters)
    assert outputs[0].tolist() == [1, 1 + 2 * ulp, 0, 0]
