"""A job's own environment is looked at in a process of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.manifest import InvalidManifest, load
from marlaas.manifest.findings import Placed
from marlaas.manifest.objects import File, Objects, read_objects
from marlaas.manifest.references import check_environments
from marlaas_api.kinds import RLJob

OWN = "environment: {name: 'games:guess', args: {limit: 3}}"
GOOD = "def guess(task, agent, limit: int = 5):\n    return 0.0\n"

MODULES = {
    f"print('[[[')\n{GOOD}": None,
    "1 / 0\n": ": importing games failed: ZeroDivisionError: division by zero",
    "import sys\nsys.exit('bye')\n": ": importing its module ended the process (exit code 1): bye",
    "import os\nos._exit(9)\n": ": importing its module ended the process (exit code 9)",
    "def gues(task, agent): ...\n": ": games has no 'guess'; did you mean 'gues'?",
    "def guess(task, agent, limits=5): ...\n": " has no argument 'limit'; did you mean 'limits'?; it takes limits",
    f"{GOOD.replace('agent', 'agents')}guess.agents = ('policy', 'critic')\n": (
        " needs the agents policy, critic; the job lacks critic (its agents: policy)"
    ),
}


@pytest.mark.parametrize("source", MODULES)
def test_a_users_module_is_found_beside_the_manifest_and_cannot_hurt_the_command(
    complaints: Callable[..., list[str]], tmp_path: Path, source: str
) -> None:
    (tmp_path / "games.py").write_text(source, encoding="utf-8")
    said = MODULES[source]
    assert complaints(OWN) == ([f"job.yaml:19: spec.environment: environment 'games:guess'{said}"] if said else [])


def test_a_module_that_never_ends_its_import_is_given_up(tmp_path: Path, manifest: Callable[..., Path]) -> None:
    (tmp_path / "games.py").write_text("while True:\n    pass\n", encoding="utf-8")
    objects = Objects()
    read_objects(File("job.yaml", tmp_path, manifest(OWN).read_text(encoding="utf-8")), objects)
    jobs = [Placed(here.object, here.source) for here in objects.placed if isinstance(here.object, RLJob)]
    assert [str(finding) for finding in check_environments(jobs, timeout_s=1)] == [
        "job.yaml:19: spec.environment: environment 'games:guess': importing its module took longer than 1 s"
    ]


def test_every_job_finds_the_module_beside_its_own_manifest(tmp_path: Path, manifest: Callable[..., Path]) -> None:
    text = manifest(OWN).read_text(encoding="utf-8")
    pool, _, job = text.split("---\n")
    for folder, source in (("good", GOOD), ("bad", "1 / 0\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "games.py").write_text(source, encoding="utf-8")
        (tmp_path / folder / "job.yaml").write_text(job.replace("sums", folder), encoding="utf-8")
    (tmp_path / "pool.yaml").write_text(pool, encoding="utf-8")
    assert load(["pool.yaml", "good/job.yaml"]).folders == (tmp_path / "good",)
    with pytest.raises(InvalidManifest) as caught:
        load(["pool.yaml", "good/job.yaml", "bad/job.yaml"])
    assert str(caught.value) == (
        "bad/job.yaml:6: spec.environment: environment 'games:guess': importing games failed: ZeroDivisionError: division by zero"
    )
