"""Deterministic kernels: which steps ask for them, that torch has one for every operation of a step, and on a GPU that the bits repeat."""

import re

import pytest
import torch
from bench.gpu.operations import OF_WHOLE_NUMBERS, Operations
from tests.tables import rows
from tests.trainer.test_learner import learner_of, segments, step

from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.trainer.compute import NoDeterministicKernel, deterministic
from marlaas_worker.trainer.model import BaseModel

OTHER_NAMES = {"NLLLoss": "nll_loss", "CTCLoss": "ctc_loss", "interpolate": "upsample", "grid_sample": "grid_sampler"}
TERMS = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}


def refused():
    """Beginnings of the names of operations that torch has no deterministic kernel for, from its own documentation."""
    text = str(torch.use_deterministic_algorithms.__doc__).partition("operations will throw a")[2]
    names = re.findall(r"\* :\w+:`[\w.]*?(\w+)`", text.partition("In addition")[0])
    assert len(names) > 20
    return tuple(OTHER_NAMES.get(name, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).rstrip("_") for name in names)


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "with KL and entropy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_deterministic_step_uses_no_operation_that_torch_refuses_then(base, algorithm, terms):
    own = {} if algorithm == "sft" else terms
    own |= {"distillation": {"teacher": "teacher"}} if algorithm == "distill" else {}
    learner = learner_of(base, algorithm=algorithm, maxStaleness=1, deterministic=True, **own)
    learner.begin()
    with Operations(has_numbers=True) as seen:
        assert step(learner, segments(1))["grad_norm"] > 0
    assert set(refused()) >= OF_WHOLE_NUMBERS
    found = {name for name in seen.counted if name.strip("_").startswith(refused())}
    assert found <= {f"{name} of whole numbers" for name in OF_WHOLE_NUMBERS}
    assert {"mm", "addmm_", "index_select", "index_add"} <= seen.counted.keys()


@pytest.mark.parametrize(("settings", "is_on"), rows(__file__, "deterministic"))
def test_kernels_are_those_of_the_job_whose_micro_batch_runs(base, settings, is_on):
    before = torch.are_deterministic_algorithms_enabled()
    own, other = learner_of(base, **settings), learner_of(base, maxStaleness=1, deterministic=not is_on)
    for learner, expected in ((own, is_on), (other, not is_on), (own, is_on)):
        with Operations(has_numbers=True) as seen:
            step(learner, segments(1))
        assert list(seen.modes) == [expected]
    refusal = "histc_cuda does not have a deterministic implementation, but you set ..."
    with pytest.raises(NoDeterministicKernel, match=r"histc_cuda .*set training"), deterministic(True):
        raise RuntimeError(refusal)
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch finds none")
@pytest.mark.parametrize("pairs_per_token", [0, 1 << 20], ids=["chains", "trees"])
def test_on_a_gpu_the_same_step_has_the_same_bits(tiny_model, pairs_per_token):
    base = BaseModel(str(tiny_model))

    def taken():
        learner = learner_of(base, maxStaleness=0, **TERMS)
        learner.begin()
        metrics = [step(learner, segments(number, 400), number, 2048, pairs_per_token) for number in range(2)]
        return metrics, learner.weights(), learner.state(1, ()).first_moments

    (metrics, *tensors), (others, *again) = taken(), taken()
    assert metrics == others
    for found, expected in zip(tensors, again, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
