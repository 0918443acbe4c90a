"""From the commit of a version to its first token, by hand, and read from the store of a run that has ended."""

from contextlib import closing
from pathlib import Path

import pytest
from bench import multitenant_versions as versions
from bench.multitenant_figures import load
from bench.multitenant_versions import Delivery, Version
from bench.multitenant_workload import MODES
from tests.bench.raw_events import BEGIN, turn, write_job

from marlaas.local.credentials import LocalIssuer
from marlaas.local.folder import OutFolder
from marlaas_api import subjects
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, RolloutUser, RunnerUser, server_config
from marlaas_api.messages import JobEvent, Manifest
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import encode

JOB = {"namespace": "team-0", "job": "job-00", "uid": "u1"}
MODE = next(one for one in MODES if one.letter == "D")


def event(number: int, at: float, reason: str = "VersionVerified") -> JobEvent:
    text = f"version {number} of agent policy is verified and served"
    return JobEvent(**JOB, role="rollout", at=BEGIN + at, reason=reason, message=text)


def manifest(number: int, at: float) -> Manifest:
    return Manifest(
        **JOB,
        agent="policy",
        version=number,
        step=number - 1,
        parent=None,
        rank=8,
        files={},
        state=None,
        tensor_digests={},
        probes=(),
        at=BEGIN + at,
    )


def test_a_version_counts_from_its_first_proof():
    found = versions.proofs([event(1, 4.0), event(1, 3.0), event(2, 5.0), event(3, 6.0, reason="Other")])
    assert found == {("team-0/job-00", 1): BEGIN + 3.0, ("team-0/job-00", 2): BEGIN + 5.0}


def test_seconds_from_commit_to_proof_and_first_token(tmp_path: Path):
    """Version 1: committed at 3 s. Its first turn ended at 6 s, was asked for at 4 s, and had four tokens in 1 s: the first at 5.25 s."""
    plays = [
        (turn(1.0, engine_s=0.5),),
        (turn(6.0, engine_s=1.0, queue_s=1.0, tokens=4, version=1), turn(7.0, engine_s=0.5, version=1)),
        (turn(8.0, engine_s=0.5, queue_s=6.5, tokens=1, version=2), turn(9.0, engine_s=0.1, version=3)),
    ]
    write_job(tmp_path, "team-0/job-00", [3.0, 9.5], plays)
    own = [(0, 0.5, 0.5), (1, 3.0, 3.5), (2, 2.0, None), (4, 9.4, 9.5)]
    known = [Version("team-0/job-00", number, BEGIN + at, proof and BEGIN + proof) for number, at, proof in own]
    found = versions.deliveries(known, load(tmp_path))
    # Version 2 was asked for at 1 s, before its commit at 2 s; its only token came at the end of its turn, at 8 s.
    assert found == [Delivery(0.5, pytest.approx(2.25), pytest.approx(1.25)), Delivery(None, 6.0, 6.0)]


def test_the_table_has_percentiles():
    seconds = [number / 100 for number in range(100)]
    table = versions.report({MODE: [Delivery(None if one > 0.5 else one, one + 1, one + 2) for one in seconds]})
    assert table.splitlines()[-1] == "| D-strict | 100 | 0.25 / 0.50 | 1.49 / 1.98 | 2.49 / 2.98 |"


async def test_versions_are_read_from_the_stores_of_a_run_that_has_ended(tmp_path: Path):
    folder = OutFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    blobs = open_blobs(str(folder.blobs))
    for number, at in ((0, 1.0), (1, 2.0), (1, 2.5)):
        one = manifest(number, at)
        await blobs.put(one.adapter.blob_prefix, "manifest", encode(one))
    keys = BusKeys.make()
    with closing(LocalIssuer(keys)) as issuer:
        async with EmbeddedNats(folder.nats_store, extra_config=server_config(keys)) as nats:
            runner = await connect(nats.url, name="runner", creds=issuer.of(RunnerUser()).path)
            await runner.ensure()
            await runner.close()
            rollout = await connect(nats.url, name="rollout", creds=issuer.of(RolloutUser("tiny")).path)
            await rollout.publish(subjects.event("team-0", "job-00", "rollout"), encode(event(1, 2.75)))
            await rollout.close()
    committed = versions._committed(folder)
    proven = await versions._proven(folder)
    assert committed == {("team-0/job-00", 0): BEGIN + 1.0, ("team-0/job-00", 1): BEGIN + 2.5}
    assert proven == {("team-0/job-00", 1): BEGIN + 2.75}
