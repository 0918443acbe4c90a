"""What the orchestrator reads of turns."""

from pathlib import Path

import pytest

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Meter, StopReason, TrajectoryRef, Turn
from marlaas_api.wire import encode
from marlaas_worker.orchestrator.records import Records


def turn(document: JobDocument, number: int, parent: int | None, output_tokens: int) -> Turn:
    return Turn(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        agent="policy",
        group="g",
        member=0,
        episode="e",
        turn=number,
        parent=parent,
        version=0,
        adapter_sha256="",
        opens_segment=parent is None,
        append="",
        prompt_ids=b"",
        output_ids=b"",
        logprobs=b"",
        text="",
        stop_reason=StopReason.STOP,
        temperature=1.0,
        meter=Meter(prompt_tokens=99, output_tokens=output_tokens),
        replica="r",
        at=0.0,
    )


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [((), 0), ((0,), 1), ((1,), 11), ((1, 2), 111), ((2, 1, 0), 111), ((1, 7), 11)],
    ids=["no turn", "one", "its parent too", "a branch", "shared turns once", "a turn no longer on record"],
)
async def test_tokens_of_a_trajectory_are_those_generated_in_its_turns(
    harness, document, tmp_path: Path, leaves, expected
):
    job = document()
    for number, parent, tokens in ((0, None, 1), (1, 0, 10), (2, 0, 100)):
        subject = subjects.turn(job.namespace, job.job, "e", number)
        await harness.bus.publish(subject, encode(turn(job, number, parent, tokens)))
    records = Records(harness.context("orchestrator"), job)
    trajectory = TrajectoryRef(member=0, episode="e", leaves=leaves, reward=0.0)
    assert await records.num_tokens([trajectory]) == expected
    assert await records.num_tokens([trajectory, trajectory]) == 2 * expected
