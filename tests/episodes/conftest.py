from collections.abc import Callable

import pytest

from marlaas_api.messages import ChatMessage, Episode, Meter, StopReason, Turn
from marlaas_api.names import JobRef, Split, episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs

REF = JobRef("team-a", "reverse", "uid-1")
IDENTITY = {"namespace": REF.namespace, "job": REF.name, "uid": REF.uid}


@pytest.fixture
def ref() -> JobRef:
    return REF


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """A scored episode of a training group; fields override."""

    def build(index: int = 0, member: int = 0, reward: float = 1.0, attempt: int = 1, **fields: object) -> Episode:
        group = str(fields.pop("group", train_group(REF, index)))
        place = {"group": group, "member": member, "episode": episode_id(group, member, attempt), "index": index}
        played = {"leaves": {"policy": (0,)}, "num_turns": 1, "duration_s": 0.5, "rewards": {"policy": reward}}
        body = {**IDENTITY, **place, **played, "split": Split.TRAIN}
        return Episode.model_validate({**body, **fields})

    return build


@pytest.fixture
def turn() -> Callable[..., Turn]:
    """A turn of an episode; fields override."""

    def build(episode: Episode, number: int = 0, text: str = "olleh", **fields: object) -> Turn:
        place = {"group": episode.group, "member": episode.member, "episode": episode.episode, "turn": number}
        ids = {"prompt_ids": pack_ids([1, 2, number]), "output_ids": pack_ids([7, 8, 9])}
        body = {
            **{**IDENTITY, **place, **ids, "agent": "policy", "version": 3, "adapter_sha256": "0" * 64},
            "parent": number - 1 if number else None,
            "opens_segment": number == 0,
            "append": (ChatMessage(role="user", content=f"spell {number}"),),
            "logprobs": pack_logprobs([-0.123456, -1.0, 0.0]),
            **{"text": text, "stop_reason": StopReason.STOP, "temperature": 1.0, "replica": "rollout-0"},
            "meter": Meter(prompt_tokens=3, output_tokens=3, queue_s=0.1, engine_s=0.2, share_s=0.125),
            "at": 100.0 + number,
        }
        return Turn.model_validate({**body, **fields})

    return build
