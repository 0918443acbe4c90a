"""Deterministic kernels: which steps ask for them, that torch has one for every operation of a step, and on a GPU that the bits repeat."""

import re

import pytest
import torch
from tests.trainer.test_learner import learner_of, segments, step
from torch.utils._python_dispatch import TorchDispatchMode

from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.trainer.batching import pack
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.rows import pack_prefix_tree

OTHER_NAMES = {"nllloss": "nll_loss", "ctcloss": "ctc_loss", "interpolate": "upsample", "grid_sample": "grid_sampler"}
COUNTS = (torch.ops.aten.bincount, torch.ops.aten.cumsum)
"""Of whole numbers and without weights they have one result, and are not refused."""
TERMS = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}


def refused():
    """Beginnings of the names of operations that torch has no deterministic kernel for, from its own documentation."""
    text = (
        (torch.use_deterministic_algorithms.__doc__ or "")
        .partition("operations will throw a")[2]
        .partition("In addition")[0]
    )
    found = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in re.findall(r"\* :\w+:`[\w.]*?(\w+)`", text)]
    assert len(found) > 20
    return tuple(OTHER_NAMES.get(name, name).rstrip("_") for name in found)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.modes = set[str](), set[bool]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.modes.add(torch.are_deterministic_algorithms_enabled())
        if not (
            func.overloadpacket in COUNTS and not args[0].is_floating_point() and len(args) + len(kwargs or ()) < 3
        ):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "with KL and entropy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_deterministic_step_uses_no_operation_that_torch_refuses_then(base, algorithm, terms):
    learner = learner_of(base, algorithm=algorithm, maxStaleness=1, deterministic=True, **terms)
    learner.begin()
    with Operations() as seen:
        assert step(learner, segments(1))["grad_norm"] > 0
    assert [name for name in seen.names if name.strip("_").startswith(refused())] == []
    assert {"mm", "addmm_", "index_select", "index_add"} <= seen.names
    assert seen.modes == {True}


@pytest.mark.parametrize(("settings", "is_on"), [({"maxStaleness": 0}, True), ({"maxStaleness": 1}, False), ({"maxStaleness": 0, "deterministic": False}, False)])  # fmt: skip
def test_kernels_are_those_of_the_job_whose_micro_batch_runs(base, settings, is_on):
    own, other = learner_of(base, **settings), learner_of(base, maxStaleness=1, deterministic=not is_on)
    for learner, expected in ((own, is_on), (other, not is_on), (own, is_on)):
        with Operations() as seen:
            step(learner, segments(1))
        assert seen.modes == {expected}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch finds none")
@pytest.mark.parametrize("pairs_per_token", [0, 1 << 20], ids=["chains", "trees"])
def test_on_a_gpu_the_same_step_has_the_same_bits(tiny_model, pairs_per_token):
    base, made = BaseModel(str(tiny_model)), []
    for _ in range(2):
        learner = learner_of(base, maxStaleness=0, **TERMS)
        learner.begin()
        full, rest = pack([], pack_prefix_tree(segments(1, 400), pairs_per_token, 2048), 2048)
        for batch in [*full, rest]:
            learner.accumulate(batch)
        gradient = learner._adapter.flat.grad
        assert gradient is not None
        made.append((gradient.clone(), learner.step(0, 1), learner.weights()))
        learner.close()
    (gradient, metrics, weights), (again, *rest_again) = made
    assert torch.equal(gradient, again)
    assert metrics == rest_again[0]
    assert all(torch.equal(value, rest_again[1][name]) for name, value in weights.items())
