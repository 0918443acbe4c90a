"""Figures about the plays of groups and steps, by which a job tells what its numbers do not show. Nothing is trained by them."""

from marlaas_api.messages.base import BusMessage


class GroupPlays(BusMessage):
    """The plays of one group's members without a fault, the same for every agent.

    prompt: digest of the first prompt and the drawn content, of the first member; empty: not known. is_mixed: members had
    different ones. tokens: generated, by member. num_turns, num_cut, num_overtime: replies, those
    that maxTokens, the context or the time limit cut, and those of the time limit.
    seconds: of the longest play. data_digest: as of `Episode`, of the first member that has one.
    """

    prompt: str = ""
    is_mixed: bool = False
    tokens: tuple[int, ...] = ()
    num_turns: int = 0
    num_cut: int = 0
    num_overtime: int = 0
    seconds: float = 0.0
    data_digest: str = ""


class Lengths(BusMessage):
    """Generated tokens of an episode, over the groups of one kind. seconds: mean time of a group's longest play."""

    num_groups: int = 0
    mean: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    max: int = 0
    seconds: float = 0.0


class StepPlays(BusMessage):
    """The plays of a step. trained, flat, dropped: of groups that train any agent, without signal, and with signal but not trained.

    prompts: the distinct digests of the trained groups. num_prompts: distinct ones of all groups. num_mixed: groups whose
    members had different ones. num_turns, num_cut, num_overtime: as of `GroupPlays`. data_digests: the
    distinct ones of its groups: several if the data changed between the loads of sandboxes.
    """

    trained: Lengths = Lengths()
    flat: Lengths = Lengths()
    dropped: Lengths = Lengths()
    prompts: tuple[str, ...] = ()
    num_prompts: int = 0
    num_mixed: int = 0
    num_turns: int = 0
    num_cut: int = 0
    num_overtime: int = 0
    data_digests: tuple[str, ...] = ()
