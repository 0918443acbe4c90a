"""What the orchestrator reads of turns."""

import pytest
from tests.harness import a_turn, identity

from marlaas_api import subjects
from marlaas_api.messages import Meter, TrajectoryRef
from marlaas_api.wire import encode
from marlaas_worker.orchestrator.records import Records


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [((), 0), ((0,), 1), ((1,), 11), ((1, 2), 111), ((2, 1, 0), 111), ((1, 7), 11)],
    ids=["no turn", "one", "its parent too", "a branch", "shared turns once", "a turn no longer on record"],
)
async def test_tokens_of_a_trajectory_are_those_generated_in_its_turns(harness, document, leaves, expected):
    job = document()
    for number, parent, tokens in ((0, None, 1), (1, 0, 10), (2, 0, 100)):
        subject = subjects.turn(job.namespace, job.job, "e", number)
        meter = Meter(prompt_tokens=99, output_tokens=tokens)
        turn = a_turn(number, parent, **identity(job), episode="e", meter=meter)
        await harness.bus.publish(subject, encode(turn))
    records = Records(await harness.context("orchestrator"), job)
    trajectory = TrajectoryRef(member=0, episode="e", leaves=leaves, reward=0.0)
    assert await records.num_tokens([trajectory]) == expected
    assert await records.num_tokens([trajectory, trajectory]) == 2 * expected
