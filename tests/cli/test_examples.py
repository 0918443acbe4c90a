"""The manifests that newcomers begin with are right, and run on one machine."""

import re
from pathlib import Path

import pytest

from marlaas.manifest import load
from marlaas.models.architectures import ADAPTABLE

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "agents").glob("*.yaml")])
MANY = sorted((ROOT / "examples" / "many").glob("*.yaml"))


@pytest.mark.parametrize("paths", [*([path] for path in EXAMPLES), MANY], ids=lambda paths: paths[0].stem)
def test_an_example_is_right_and_needs_no_remark(paths: list[Path]) -> None:
    manifest = load(paths, runnable=True)
    assert manifest.jobs
    assert [str(note) for note in manifest.notes] == []


def test_the_quickstart_trains_two_jobs_of_two_tenants_at_once() -> None:
    manifest = load([next(path for path in EXAMPLES if path.name == "quickstart.yaml")])
    assert [f"{job.metadata.namespace}/{job.metadata.name}" for job in manifest.jobs] == [
        "team-a/reverse",
        "team-b/calculator",
    ]
    (pool,) = manifest.pools
    needed = sum(job.spec.training.max_staleness + 2 for job in manifest.jobs)
    assert pool.spec.adapter_slots >= needed
    assert {name for tenant in manifest.tenants for name in tenant.spec.namespaces} == {"team-a", "team-b"}


def test_every_architecture_is_listed() -> None:
    listed = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8").rpartition("## Architectures")[2]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", listed)) == ADAPTABLE
