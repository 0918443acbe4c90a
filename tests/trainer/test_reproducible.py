"""Trainers that compute on two threads of a busy machine get the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from marlaas_worker.trainer.compute import compute_reproducibly

PROGRAM = Path(__file__).parent / "gradient_digest.py"


@pytest.mark.parametrize(("said", "precision"), [(None, "highest"), ("high", "high")])
def test_on_a_gpu_float32_products_are_as_precise_as_the_engines(monkeypatch, said, precision):
    monkeypatch.delenv("VLLM_FLOAT32_MATMUL_PRECISION", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if said is not None:
        monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", said)
    torch.set_float32_matmul_precision("medium")
    try:
        compute_reproducibly(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


def start(model):
    """A fresh process that says a gradient's digest; nothing about threads is set from outside."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    command = [sys.executable, str(PROGRAM), str(model), "2"]
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_with_two_threads_compute_the_same_gradient_bytes_while_they_fight_for_the_processor(tiny_model):
    processes = [start(tiny_model) for _ in range(2)]
    said = [process.communicate()[0].split() for process in processes]
    assert all(words == said[0] for words in said)
    assert said[0][1:] == ["2", "AUTO,STRICT"]
