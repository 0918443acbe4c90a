"""From the commit of a version to its first token, by hand, and read from the store of a run that has ended."""

from pathlib import Path

import pytest
from bench import multitenant_versions as versions
from bench.multitenant_figures import load
from bench.multitenant_versions import Delivery, Version
from tests.bench.raw_events import BEGIN, turn, write_job

from marlaas_api.messages import JobEvent

JOB = {"namespace": "team-0", "job": "job-00", "uid": "u1"}


def event(number: int, at: float, reason: str = "VersionVerified") -> JobEvent:
    text = f"version {number} of agent policy is verified and served"
    return JobEvent(**JOB, role="rollout", at=BEGIN + at, reason=reason, message=text)


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
