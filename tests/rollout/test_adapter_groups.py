import pytest
import torch

from marlaas_worker.rollout.adapter_groups import add_adapters, group_rows

RANK, INPUTS, WIDTHS = 3, 5, (4, 2)


@pytest.mark.parametrize(
    "slots",
    [
        [0, 0, 0, 0],
        [2, 2, 0, 0],
        [0, 1, 0, 2],
        [-1, 1, -1, 1],
        [-1, -1, -1, -1],
        [1, -1, 0, 1],
    ],
)
def test_every_row_gets_its_own_adapter_and_rows_without_one_get_nothing(slots):
    torch.manual_seed(0)
    a = [torch.randn(3, 1, RANK, INPUTS) for _ in WIDTHS]
    b = [torch.randn(3, 1, width, RANK) for width in WIDTHS]
    inputs, outputs = torch.randn(4, INPUTS), torch.randn(4, sum(WIDTHS))
    expected = outputs.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            deltas = [b_part[slot, 0] @ (a_part[slot, 0] @ inputs[row]) for a_part, b_part in zip(a, b, strict=True)]
            expected[row] += torch.cat(deltas)
    add_adapters(outputs, inputs, group_rows(torch.tensor(slots)), a, b)
    torch.testing.assert_close(outputs, expected)


def test_consecutive_rows_are_a_slice():
    groups = group_rows(torch.tensor([1, 1, 0, 2, 0]))
    assert [slot for slot, _ in groups] == [0, 1, 2]
    assert groups[1][1] == slice(0, 2)
    assert isinstance(groups[0][1], torch.Tensor)
