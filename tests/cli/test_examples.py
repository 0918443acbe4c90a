"""The manifests that newcomers begin with are right, and run on one machine."""

from pathlib import Path

import pytest

from marlaas.manifest import load

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_right_and_needs_no_remark(path: Path) -> None:
    manifest = load([path], runnable=True)
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
