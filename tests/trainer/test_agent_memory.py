"""The memory that a trainer reports for its agents: from its container's limit, in the units in which agents need it."""

import pytest

from marlaas_worker.trainer.agent_memory import AgentMemory, measure, memory_limit, room_bytes
from marlaas_worker.trainer.model import BaseModel


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


@pytest.mark.parametrize(("free", "room"), [(0, 0), (1000, 720), (100, 40), (-5, 1)])
def test_unknown_is_not_the_same_as_full(free, room):
    assert room_bytes(free, 100) == room


def test_an_adapter_on_every_layer_needs_what_is_reported_for_its_rank(tiny_model, monkeypatch):
    model = BaseModel(str(tiny_model), device="cpu")
    monkeypatch.setattr("marlaas_worker.trainer.agent_memory.memory_limit", lambda: None)
    memory = measure(model, 100)
    adapter = model.attach(8, 16, ())
    weights = sum(parameter.numel() for parameter in adapter.parameters.values())
    assert memory == AgentMemory(0, 2 * weights)
    assert 8 * memory.bytes_per_rank == 4 * 4 * weights
