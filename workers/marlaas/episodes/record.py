"""Episode format on disk: the sandbox's result joined with the engine's turns. Pure.

Token ids are exact. `text` is their decoding, as `marlaas.environment.Reply.text`.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from marlaas_api.messages import ChatMessage, Choice, Ending, Episode, FaultClass, ReplyPartsMessage, StopReason, Turn
from marlaas_api.messages.agent_settings import AgentSettings, trained_reward
from marlaas_api.names import Split
from marlaas_api.wire import unpack_ids, unpack_logprobs

_DIGITS = 4
"""Decimals of a stored logprob. They are for display; trainers use the exact ones of the stream."""


class _Kept(BaseModel):
    """Base of stored records. Ignores unknown fields, which a newer MARLaaS may write."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TurnRecord(_Kept):
    """One generation of an agent.

    append: chat messages, or raw text, that were appended before it.
    opening: beginning of the assistant's message that stands in the prompt: the chat template's (`<think>`), or the environment's.
    prompt_ids: ids of the appended part only, or of the whole prompt if the turn opens a segment.
    parts: reasoning, content and calls; None if the reply is plain text.
    logprobs: of output_ids, under the policy that sampled them.
    num_prompt_tokens: of the whole prompt. num_cached_tokens: of these, from the engine's prefix cache.
    queue_s, engine_s: seconds. share_s: its share of the engine's time. at: unix time of its end.
    """

    agent: str
    turn: int
    parent: int | None = None
    version: int
    opens_segment: bool = True
    append: tuple[ChatMessage, ...] | str
    text: str
    parts: ReplyPartsMessage | None = None
    opening: str = ""
    stop_reason: StopReason
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0
    share_s: float = 0.0
    at: float = 0.0


class EpisodeRecord(_Kept):
    """One play of a task. It has either a `fault` and does not count, or `rewards` per agent.

    at: unix time of its last turn's end; 0 if it has no turn. duration_s includes tool_s, the time in the policy's
    tools. choices: the candidates of each choice, with their rewards.
    """

    episode: str
    group: str
    split: Split
    index: int
    member: int
    at: float = 0.0
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    ending: Ending = Ending.COMPLETED
    tool_error: str = ""
    fault: FaultClass | None = None
    fault_text: str = ""
    load_notes: tuple[str, ...] = ()
    prior_faults: tuple[FaultClass, ...] = ()
    duration_s: float = 0.0
    tool_s: float = 0.0
    turns: tuple[TurnRecord, ...] = ()
    choices: tuple[Choice, ...] = ()

    def speaks(self, agent: str) -> bool:
        """Return whether an agent has taken a turn."""
        return any(turn.agent == agent for turn in self.turns)

    def own_turns(self, agent: str) -> list[TurnRecord]:
        """Return an agent's turns that are no candidates. They train with the episode's reward."""
        candidates = {turn for choice in self.choices if choice.agent == agent for turn in choice.turns}
        return [turn for turn in self.turns if turn.agent == agent and turn.turn not in candidates]

    def is_compared(self, agent: str, *, is_alone: bool) -> bool:
        """Return whether the episode's reward is compared for an agent: it has a turn that is no candidate, or no agent has a turn.

        Args:
            is_alone: the job has one agent.
        """
        return bool(self.own_turns(agent)) or (is_alone and not self.turns)

    def trained_reward(self, agent: AgentSettings) -> float:
        """Return the reward with which an agent is trained: its own, or the weighted sum that the job wants."""
        return trained_reward(agent, self.rewards)

    @property
    def reward(self) -> float | None:
        """Mean reward over the agents; None for a fault."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards and self.fault is None else None

    @property
    def versions(self) -> dict[str, int]:
        """By agent with turns, in the order of their first turns, the policy version that sampled them."""
        return {turn.agent: turn.version for turn in self.turns}


def joined(episode: Episode, turns: Sequence[Turn]) -> EpisodeRecord:
    """Join an episode with its turns, given in any order; those of several agents are sorted by their time."""
    order = sorted(turns, key=lambda turn: (turn.at, turn.turn) if _are_several(turns) else (0.0, turn.turn))
    kept = tuple(_turn(turn) for turn in order)
    same = (
        "episode",
        "group",
        "split",
        "index",
        "member",
        "rewards",
        "metrics",
        "ending",
        "tool_error",
        "fault",
        "fault_text",
        "load_notes",
    )
    fields = {name: getattr(episode, name) for name in (*same, "prior_faults", "duration_s", "tool_s", "choices")}
    return EpisodeRecord(**fields, at=max((turn.at for turn in kept), default=0.0), turns=kept)


def _are_several(turns: Sequence[Turn]) -> bool:
    """Whether turns are of several agents, whose numbers do not give their order."""
    return len({turn.agent for turn in turns}) > 1


def _turn(turn: Turn) -> TurnRecord:
    same = (
        "agent",
        "turn",
        "parent",
        "version",
        "opens_segment",
        "append",
        "text",
        "parts",
        "opening",
        "stop_reason",
        "at",
    )
    return TurnRecord(
        **{name: getattr(turn, name) for name in same},
        prompt_ids=tuple(unpack_ids(turn.prompt_ids).tolist()),
        output_ids=tuple(unpack_ids(turn.output_ids).tolist()),
        logprobs=tuple(round(value, _DIGITS) for value in unpack_logprobs(turn.logprobs).tolist()),
        num_prompt_tokens=turn.meter.prompt_tokens,
        num_cached_tokens=turn.meter.cached_tokens,
        queue_s=turn.meter.queue_s,
        engine_s=turn.meter.engine_s,
        share_s=turn.meter.share_s,
    )
