"""A published adapter out of the cluster: what the orchestrator's pod sends, and what becomes of it here."""

import io
import json
import math
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.conftest import invoke
from tests.harness import a_step
from tests.tables import data, rows

from marlaas.cluster.errors import AccessDenied, CommandFailed
from marlaas.cluster.fetching import Published, fetch, published
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.published import VersionRequest, pack
from marlaas.cluster.records import parsed, written
from marlaas.cluster.views import ClusterJobView, job_view
from marlaas.clusters import ClusterJob
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec
from marlaas_api.errors import InvalidInput, Permanent
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument, Manifest, PolicyRecord
from marlaas_api.names import JobRef
from marlaas_api.wire import encode

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 8}}
ARGUMENTS = ["--name=$(POD_NAME)", "--nats=nats://n:4222", "--blobs=file:///b", "--health=8081"]
CONTAINERS = [{"name": "orchestrator", "args": ARGUMENTS}]
PLACE = {"namespace": "marlaas-system", "name": "marlaas-orchestrator-7f"}
POD = {"metadata": PLACE, "spec": {"containers": CONTAINERS}}
NEWEST = Published("policy", 7, "a/sums/7")


async def test_the_pod_sends_the_files_of_the_version_that_the_bus_says():
    bus, blobs = MemoryServer().connect("test"), MemoryBlobs()
    await bus.ensure()
    identity: dict[str, Any] = {"namespace": "a", "job": "sums", "uid": "u1"}
    job = JobDocument(**identity, pool="tiny", tenant="a", spec=job_spec(RLJobSpec.model_validate(SPEC)))
    files = {"adapter_config.json": await blobs.put("a", "adapter_config.json", b"{}")}
    trained: dict[str, Any] = {"parent": None, "rank": 8, "state": None, "tensor_digests": {}, "probes": ()}
    manifest = Manifest(**identity, agent="policy", version=3, step=2, files=files, **trained)
    record = PolicyRecord(uid="u1", version=3, manifest=await blobs.put("a", "manifest", encode(manifest)))
    await (await bus.bucket(subjects.JOBS)).put(subjects.job_key("a", "sums"), encode(job))
    await (await bus.bucket(subjects.POLICY)).put(subjects.policy_key("a", "sums", "policy"), encode(record))
    sent = io.BytesIO()
    await pack(bus, blobs, VersionRequest("a", "sums", "policy", 3), sent)
    sent.seek(0)
    with tarfile.open(fileobj=sent) as tar:
        assert tar.getnames() == ["adapter_config.json"]
    with pytest.raises(Permanent, match="has no version 4"):
        await pack(bus, blobs, VersionRequest("a", "sums", "policy", 4), io.BytesIO())
    with pytest.raises(Permanent, match="job a/other does not exist on the bus"):
        await pack(bus, blobs, VersionRequest("a", "other", "policy", 3), io.BytesIO())
    await bus.close()


async def test_the_pod_sends_the_records_after_those_that_are_known_and_they_are_read_here(cluster, tmp_path):
    bus = MemoryServer().connect("test")
    await bus.ensure()
    for uid, number in (("u0", 0), ("u1", 0), ("u1", 1)):
        step = a_step(SimpleNamespace(namespace="a", job="sums", uid=uid), number, metrics={"ess": float("nan")})
        await bus.publish(subjects.step("a", "sums", uid, number), encode(step))
    after = {step: await written(bus, JobRef("a", "sums", "u1"), step, -1) for step in (-1, 0, 1)}
    assert [[record.step for record in parsed(text.encode())] for text in after.values()] == [[0, 1], [1], []]
    (tmp_path / "records").write_text(after[-1])
    kubectl = cluster("cat records", [POD], {**_body(), "status": {"phase": "Succeeded"}})
    job = ClusterJob(kubectl, "sums")
    assert [(step.step, math.isnan(step.metrics["ess"])) for step in job.steps()] == [(0, True), (1, True)]
    assert ([row["step"] for row in job.rows()], [*job.evaluations()]) == ([0, 1], [])
    assert (await job).phase == "Succeeded"
    wanted = "-m marlaas.cluster.records --nats=nats://n:4222 --namespace a --job sums --uid u1 --step -1"
    assert wanted in (tmp_path / "calls").read_text()
    await bus.close()


def _body(*agents: dict[str, Any]) -> dict[str, Any]:
    meta = {"namespace": "a", "name": "sums", "uid": "u1"}
    return {"metadata": meta, "spec": SPEC, "status": {"phase": "Running", "agents": list(agents)}}


def _job(*agents: dict[str, Any]) -> ClusterJobView:
    return job_view(_body(*agents))


def test_the_promoted_version_counts_otherwise_the_newest_and_a_player_has_none():
    newest = {"name": "policy", "policyVersion": 7, "adapter": "a/sums/7"}
    assert published(_job(newest), None) == (NEWEST,)
    (promoted,) = published(_job({**newest, "promotedVersion": 5}), "policy")
    assert promoted.version == 5
    assert published(_job({"name": "o", "policyVersion": 7}, newest), "policy") == (NEWEST,)


@pytest.mark.parametrize(("agents", "agent", "sentence"), rows(__file__, "no_adapter"))
def test_a_job_without_such_an_adapter_says_so(agents, agent, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        published(_job(*agents), agent)


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., Kubectl]:
    """A stand-in for kubectl: prints the job and pods, and for exec what it is given; what it was called with stands in `calls`."""

    def make(exec_script: str, pods: list[dict[str, Any]], job: dict[str, Any] | None = None) -> Kubectl:
        (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
        (tmp_path / "rljobs.json").write_text(json.dumps(job))
        program = tmp_path / "kubectl"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\necho "$@" >> calls\ncase "$1" in get) cat ${{2%%.*}}.json;; exec) {exec_script};; esac\n'
        )
        program.chmod(0o755)
        return Kubectl(program=str(program))

    return make


def _archive(path: Path, *names: str) -> None:
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(member := tarfile.TarInfo(name), io.BytesIO(b""))
            assert member.isfile()


def test_an_adapter_becomes_a_folder_and_replaces_an_older_one(cluster, tmp_path):
    _archive(tmp_path / "adapter.tar", "adapter_config.json", "../outside", "adapter_model.safetensors")
    kubectl = cluster("cat adapter.tar", [POD])
    target = tmp_path / "out"
    for _ in range(2):
        fetch(kubectl, _job(), [NEWEST], target)
    assert sorted(path.name for path in target.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "calls").read_text().splitlines()[1] == (
        "exec marlaas-orchestrator-7f --container=orchestrator --namespace=marlaas-system -- python3 -m marlaas.cluster.published "
        "--nats=nats://n:4222 --blobs=file:///b --namespace a --job sums --agent policy --version 7"
    )


def test_of_several_agents_each_gets_a_folder_and_a_named_one_is_fetched_alone(cluster, tmp_path, monkeypatch):
    for agent in ("solver", "verifier"):
        _archive(tmp_path / f"{agent}.tar", "adapter_config.json", "adapter_model.safetensors", f"of-{agent}.txt")
    agents = data(__file__, "agents_with_adapters")
    body = _body(*agents)
    body["spec"] = {**SPEC, "agents": [{"name": name} for name in ("solver", "verifier", "critic")]}
    script = 'case "$*" in *"--agent solver --version 7") cat solver.tar;; *) cat verifier.tar;; esac'
    kubectl = cluster(script, [POD], body)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    said = invoke("adapter", "sums", "--out", "all")
    versions = {"solver": 7, "verifier": 4}.items()
    told = [f"all/{name}: version {version} of agent {name} of a/sums" for name, version in versions]
    assert said.output.splitlines() == [*told, "note: no version yet of critic"]
    found = sorted(str(path) for path in Path("all").glob("*/of-*"))
    assert found == ["all/solver/of-solver.txt", "all/verifier/of-verifier.txt"]
    assert invoke("adapter", "sums", "--agent", "verifier", "--out", "one").exit_code == 0
    assert (tmp_path / "one" / "of-verifier.txt").is_file()
    job = job_view(body)
    with pytest.raises(InvalidInput, match="one holds the adapter of one agent"):
        fetch(kubectl, job, published(job, None), Path("one"))
    with pytest.raises(InvalidInput, match="agent critic of a/sums has no adapter yet; agents with an adapter: solver"):
        published(job, "critic")
    (tmp_path / "all" / "verifier" / "adapter_config.json").unlink()
    num_calls = len((tmp_path / "calls").read_text().splitlines())
    with pytest.raises(InvalidInput, match="verifier holds files other than an adapter"):
        fetch(kubectl, job, published(job, None), Path("all"))
    assert len((tmp_path / "calls").read_text().splitlines()) == num_calls, "nothing is fetched"


@pytest.mark.parametrize("kept", [700, 512])
def test_half_an_archive_is_no_adapter(cluster, tmp_path, kept):
    _archive(tmp_path / "adapter.tar", "adapter_config.json", "adapter_model.safetensors")
    kubectl = cluster(f"head -c {kept} adapter.tar", [POD])
    with pytest.raises(CommandFailed, match="the transfer of the adapter was incomplete"):
        fetch(kubectl, _job(), [NEWEST], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_who_may_not_look_into_the_pod_is_told_where_the_adapter_lies(cluster, tmp_path):
    refusal = 'Error from server (Forbidden): pods "x" is forbidden: User "ann" cannot create resource "pods/exec"'
    with pytest.raises(AccessDenied, match="is in the blob store under a/sums/7, from where the platform team can"):
        fetch(cluster(f"echo '{refusal}' >&2; exit 1", [POD]), _job(), [NEWEST], tmp_path / "o")


def test_a_pod_elsewhere_that_calls_itself_the_orchestrator_is_never_asked(cluster, tmp_path):
    forged = {**POD, "metadata": {"namespace": "a-tenant", "name": "forged"}}
    kubectl = cluster("echo forged", [forged, POD])
    with pytest.raises(InvalidInput, match="namespaces a-tenant, marlaas-system have the orchestrator's labels"):
        fetch(kubectl, _job(), [NEWEST], tmp_path / "out")
    assert "exec" not in (tmp_path / "calls").read_text()
