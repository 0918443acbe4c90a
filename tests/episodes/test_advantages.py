import math

import pytest

from marlaas.episodes.record import joined
from marlaas.episodes.selection import advantages_of
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobSpec
from marlaas_api.wire import pack_ids


def _spec(algorithm: str, **training: object) -> JobSpec:
    body = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "rollout": {"maxTokens": 10}}
    return job_spec(RLJobSpec.model_validate({**body, "training": {"steps": 3, "algorithm": algorithm, **training}}))


@pytest.fixture
def members(episode, turn):
    """Rewards 1 and 0; the first one's longest turn has 3 tokens, the second one's 10."""
    plays = [episode(0, 0, 1.0), episode(0, 1, 0.0)]
    ids = [[1, 2, 3], list(range(10))]
    return [joined(one, [turn(one, output_ids=pack_ids(own))]) for one, own in zip(plays, ids, strict=True)]


def test_an_advantage_is_the_trainers_own(members):
    assert advantages_of(_spec("grpo"))(members, "policy") == pytest.approx([1.0, -1.0], abs=1e-5)
    assert advantages_of(_spec("dr-grpo"))(members, "policy") == [0.5, -0.5]
    assert advantages_of(_spec("rloo"))(members, "policy") == [1.0, -1.0]


def test_an_overlong_reply_is_punished_where_the_algorithm_does_so(members):
    """dapo with 4 tokens: the second reward becomes 0 - 1; standardised, two rewards are at plus and minus one all the same."""
    third = members[0].model_copy(update={"rewards": {"policy": 0.0}})
    found = advantages_of(_spec("dapo", overlong={"tokens": 4}))([*members, third], "policy")
    rewards = [1.0, -1.0, 0.0]
    deviation = math.sqrt(2 / 3)
    assert found == pytest.approx([reward / deviation for reward in rewards], abs=1e-5)


def test_what_a_group_alone_cannot_tell_is_not_made_up():
    assert advantages_of(_spec("reinforce++")) is None
