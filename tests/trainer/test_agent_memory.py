"""The memory that a trainer reports for its agents: from its container's limit, in the units in which agents need it."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.harness import pool_document
from tests.trainer.jobs import assignment_of, job
from tests.trainer.test_learner import away

from marlaas_api.messages import PoolDocument
from marlaas_api.numeric import trained_bytes
from marlaas_worker.orchestrator.capacity import PoolCapacity, trainer_bytes
from marlaas_worker.trainer import agent_memory
from marlaas_worker.trainer.agent_memory import measure, memory_limit
from marlaas_worker.trainer.learner import Learner


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1048576\n"}, 1048576),
        ({"memory/memory.limit_in_bytes": "1048576"}, 1048576),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_limit_is_that_of_the_container_in_both_versions_of_cgroups(tmp_path, files, limit):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def pool(**fields: object) -> PoolDocument:
    return pool_document(Path("m"), trainer={"activationBytes": "100"}).model_copy(update=fields)


@pytest.fixture
def machine(monkeypatch):
    """Set the limit of this container, and the memory that the machine has available."""

    def be(limit: int | None, available: int) -> None:
        monkeypatch.setattr(agent_memory, "memory_limit", lambda: limit)
        monkeypatch.setattr(agent_memory, "resident_bytes", lambda: 1000)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))

    return be


@pytest.mark.parametrize(
    ("limit", "estimate", "room"),
    [(3100, 0, 1600), (None, 0, 3920), (3100, 77, 77), (None, 77, 77), (900, 0, 1)],
    ids=["a container", "no limit: half of the machine", "the runner's", "the runner's, no limit", "no memory left"],
)
def test_the_room_is_known_on_every_machine(base, machine, limit, estimate, room):
    """0.8 x (3100 - 1000 - 100); 0.8 x (10000 / 2 - 100)."""
    machine(limit, 10_000)
    memory = measure(base, pool(agent_room_bytes=estimate))
    assert (memory.room_bytes, memory.host_bytes) == (room, 0)


@pytest.mark.parametrize(("limit", "host_bytes"), [(None, 2500), (5000, 1000), (500, 0)])
def test_with_an_accelerator_a_quarter_of_the_hosts_free_memory_keeps_versions(
    base, machine, monkeypatch, limit, host_bytes
):
    machine(limit, 10_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    monkeypatch.setattr(base, "device", torch.device("cuda"))
    memory = measure(base, pool(agent_room_bytes=77))
    assert (memory.room_bytes, memory.host_bytes) == (400, host_bytes)


@pytest.mark.parametrize(
    ("agent", "kl", "copies"),
    [
        ({}, {}, 4),
        ({}, {"coefficient": 0.1}, 4),
        ({}, {"coefficient": 0.1, "reference": {"versionsBehind": 1}}, 5),
        ({}, {"reference": {"versionsBehind": 1}}, 4),
        ({}, {"coefficient": 0.1, "reference": {"path": "FOLDER"}}, 5),
        ({"initFrom": {"path": "FOLDER"}}, {"coefficient": 0.1}, 5),
        ({"initFrom": {"path": "FOLDER"}}, {}, 4),
    ],
)
def test_a_kl_reference_that_is_not_the_base_model_is_one_copy_more(base, tmp_path, agent, kl, copies):
    path = {"path": str(away(base, tmp_path / "start"))}
    agent = {"initFrom": path} if agent else {}
    kl |= {"reference": path} if "path" in kl.get("reference", {}) else {}
    document = job(agent=agent, kl=kl)
    (policy,) = document.spec.agents
    assert trained_bytes(8, document.spec.has_reference_adapter(policy), 4) == 8 * copies
    assert trainer_bytes(document, "tiny", PoolCapacity(8, 16, bytes_per_rank=4)) == 8 * copies
    learner = Learner(base, assignment_of(document))
    weights = sum(parameter.numel() for parameter in base.attach(8, 16, ()).parameters.values())
    assert 8 * measure(base, pool()).bytes_per_rank == 4 * 4 * weights
    learner.begin()
    follows = "versionsBehind" in kl.get("reference", {})
    assert follows or (learner._reference is not None) == (copies == 5)
