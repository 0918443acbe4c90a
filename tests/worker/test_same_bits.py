"""A role asks for the same bits before anything can compute."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from marlaas_worker.__main__ import main
assert "torch" not in sys.modules, "MKL would have read its settings before they are made"
from marlaas_worker.process_setup import ask_for_the_same_bits
import os
ask_for_the_same_bits()
print(os.environ["MKL_CBWR"], os.environ["MKL_DYNAMIC"])
"""

PRODUCTS = """
import hashlib
import torch
from marlaas_worker.process_setup import ask_for_the_same_bits
ask_for_the_same_bits()
torch.manual_seed(0)
torch.set_num_threads(1)

def placed(values, offset):
    room = torch.empty(values.numel() + 16)[offset : offset + values.numel()].view(values.shape)
    return room.copy_(values)

for rows, inner, outer in [(1, 128, 8), (7, 128, 8), (1, 8, 384)]:
    left, right = torch.randn(rows, inner), torch.randn(outer, inner)
    products = (placed(left, i) @ placed(right, j).T for i in range(16) for j in range(16))
    print(len({hashlib.sha256(product.numpy().tobytes()).hexdigest() for product in products}))
"""


def run(*arguments, **variables):
    """Run a script without the settings of MKL that the tests have; return the words that it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")} | variables
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.processes
def test_a_role_asks_before_anything_that_computes_is_imported_and_what_the_user_has_set_stays():
    assert run(SCRIPT) == ["AUTO,STRICT", "FALSE"]
    assert run(SCRIPT, MKL_CBWR="AVX2") == ["AVX2", "FALSE"]


@pytest.mark.processes
def test_a_product_has_the_same_bits_wherever_its_matrices_lie_in_memory():
    """Shapes of an adapter of rank 8. Without being asked, MKL gives some of them several results on most processors."""
    assert run(PRODUCTS) == ["1", "1", "1"]
