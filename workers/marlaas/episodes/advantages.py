"""Advantages of recorded rewards, recomputed with the trainer's own functions. Pure."""

from collections.abc import Sequence

from marlaas.episodes.record import EpisodeRecord
from marlaas.episodes.selection import Advantages
from marlaas_api.kinds import RLJobSpec
from marlaas_worker.rl.advantages import advantages, overlong_penalty
from marlaas_worker.rl.algorithms import ALGORITHMS


def advantages_of(spec: RLJobSpec) -> Advantages | None:
    """Return the function from a group to its advantages; None if the algorithm compares the rewards of a whole step."""
    rule = ALGORITHMS[spec.training.algorithm]
    if rule.over != "group":
        return None
    max_tokens, asked = spec.rollout.max_tokens, spec.training.overlong.tokens
    overlong = int(rule.overlong * max_tokens) if asked is None else asked

    def of(members: Sequence[EpisodeRecord], agent: str) -> list[float]:
        penalties = [overlong_penalty(_longest(one, agent), max_tokens, overlong) for one in members]
        rewards = [one.rewards[agent] + penalty for one, penalty in zip(members, penalties, strict=True)]
        return advantages(rule.advantage, rewards)

    return of


def _longest(record: EpisodeRecord, agent: str) -> int:
    """Return the number of tokens in the agent's longest turn."""
    return max((len(turn.output_ids) for turn in record.turns if turn.agent == agent), default=0)
