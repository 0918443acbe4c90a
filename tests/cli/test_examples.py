"""The manifests that newcomers begin with are right, and run on one machine; so are those that docs/ shows."""

import re
from pathlib import Path

import pytest

from marlaas.manifest import load
from marlaas.models.architectures import ADAPTABLE

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "agents").glob("*.yaml")])
MANY = sorted((ROOT / "examples" / "many").glob("*.yaml"))
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("name", ["models.md", "data-order.md"])
def test_every_manifest_shown_is_right(name: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
        manifest = load([tmp_path / "shown.yaml"], runnable=False)
        assert manifest.pools or manifest.jobs


def test_every_architecture_is_listed() -> None:
    listed = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").rpartition("## Architectures")[2]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", listed)) == ADAPTABLE
