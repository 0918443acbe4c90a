"""`bench agents --only digests`: the jobs that are compared, and the verdict."""

from pathlib import Path

import pytest
import yaml
from bench import team_env
from bench.agent_digests import AGENTS, HEADERS, TENSORS, digests_of, manifests, rows_of

from marlaas.local.folder import OutFolder
from marlaas.manifest import load
from marlaas_api.blobs import BlobRef
from marlaas_api.blobs_store import open_blobs
from marlaas_api.messages import Manifest
from marlaas_api.wire import encode

TEAM = {"solver": ["s0", "s1"], "verifier": ["v0", "v1"]}


def test_the_jobs_differ_only_in_who_speaks_and_is_trained(tmp_path: Path) -> None:
    pool, team, *alone = manifests(3)
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump_all([pool, team, *alone]))
    (tmp_path / "team_env.py").write_text(Path(str(team_env.__file__)).read_text())
    assert len(load([tmp_path / "jobs.yaml"]).jobs) == 3
    assert pool["spec"]["rollout"]["engine"] == "reference"
    assert team["spec"]["training"]["maxStaleness"] == 0
    for job, speaker in zip(alone, AGENTS, strict=True):
        assert job["metadata"]["name"] == speaker
        assert [one["name"] for one in job["spec"]["agents"] if one["trainable"]] == [speaker]
        assert job["spec"] | {"agents": 0, "environment": 0} == team["spec"] | {"agents": 0, "environment": 0}


@pytest.mark.parametrize(
    ("own", "told"),
    [(["v0", "v1"], "same"), (["v0", "v2"], "different"), (["v0"], "different")],
)
def test_every_version_counts(own: list[str], told: str) -> None:
    rows = rows_of(7, {"team": TEAM, "solver": {"solver": ["s0", "s1"]}, "verifier": {"verifier": own}})
    assert rows == [
        [7, "solver", "0 to 1", "s1", "s1", "same"],
        [7, "verifier", "0 to 1", "v1", own[-1], told],
    ]
    assert len(rows[0]) == len(HEADERS)


def test_an_agent_that_never_changed_proves_nothing() -> None:
    still = {"solver": ["s0", "s0"], "verifier": ["v0", "v1"]}
    digests = {"team": still, "solver": {"solver": ["s0", "s0"]}, "verifier": {"verifier": ["v0", "v1"]}}
    assert [row[-1] for row in rows_of(0, digests)] == ["never changed", "same"]


async def test_digests_are_read_from_the_manifests_in_order_of_the_versions(tmp_path: Path) -> None:
    blobs = open_blobs(str(OutFolder(tmp_path).blobs))
    for version in (10, 9):
        one = Manifest(
            namespace="team-a",
            job="team",
            uid="u",
            agent="solver",
            version=version,
            step=0,
            parent=None,
            rank=8,
            files={TENSORS: BlobRef(name="x", sha256=f"{version:064}", size_bytes=1)},
            state=None,
            tensor_digests={},
            probes=(),
        )
        await blobs.put(one.adapter.blob_prefix, "manifest", encode(one))
    assert digests_of(tmp_path) == {"team": {"solver": [f"{9:064}", f"{10:064}"]}}
