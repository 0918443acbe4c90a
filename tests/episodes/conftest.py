import pytest
from tests.harness import a_turn, an_episode, identity, job_document

from marlaas_api.messages import ChatMessage, Meter
from marlaas_api.names import episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs

REVERSE = job_document("reverse", uid="uid-1")


@pytest.fixture
def ref():
    return REVERSE.ref


@pytest.fixture
def episode():
    def build(index=0, member=0, reward=1.0, attempt=1, **fields: object):
        group = str(fields.pop("group", train_group(REVERSE.ref, index)))
        played = {"leaves": {"policy": (0,)}, "num_turns": 1, "duration_s": 0.5, "rewards": {"policy": reward}}
        names = {"group": group, "episode": episode_id(group, member, attempt)}
        return an_episode(REVERSE, index, member, **{**names, **played, **fields})

    return build


@pytest.fixture
def turn():
    def build(episode, number=0, text="olleh", **fields: object):
        place = {"group": episode.group, "member": episode.member, "episode": episode.episode, "text": text}
        tokens = {"prompt_ids": pack_ids([1, 2, number]), "output_ids": pack_ids([7, 8, 9]), "version": 3}
        tokens |= {"logprobs": pack_logprobs([-0.123456, -1.0, 0.0]), "at": 100.0 + number}
        meter = Meter(prompt_tokens=3, output_tokens=3, queue_s=0.1, engine_s=0.2, share_s=0.125)
        said = {"append": (ChatMessage(role="user", content=f"spell {number}"),), "meter": meter}
        return a_turn(
            number, number - 1 if number else None, **{**identity(REVERSE), **place, **tokens, **said, **fields}
        )

    return build
