"""Validation of the episodes that sandboxes publish.

The author of an episode has the job's sandbox credential and runs a tenant's code, so nothing in it is trusted.
An episode that our sandboxes could not have written fails its job with an error text, and affects no other job.
Blob references in messages are not followed: they could name any file of the blob store.
Episodes of open groups stay in memory, which all jobs share: `slim` bounds what one takes, and `OpenGroups` what all of a job take.
"""

from collections.abc import Mapping

from marlaas_api.bus import Stored
from marlaas_api.errors import Permanent
from marlaas_api.messages import Episode, JobDocument
from marlaas_api.names import MAX_TURNS_FACTOR, Split, end_of_turns, group_token, is_attempt
from marlaas_api.wire import BadMessage, decode_as

MAX_METRICS = 1000
MAX_METRIC_NAME = 256
MAX_PRIOR_FAULTS = 100
MAX_NUMBER = 1e30
"""Largest absolute reward or metric: sums and squares stay finite in float64, sums also in the trainer's float32."""
MAX_FAULT_CHARACTERS = 64 << 10
MAX_TOKENS = 1 << 40
"""Most tokens of an episode: sums of them stay exact."""
MAX_SECONDS = 30 * 86400.0
"""Longest duration of an episode, in seconds: turns are kept no longer. So sums of durations stay finite, and a status is valid JSON."""
_NO_TEXTS: Mapping[str, object] = {"fault_text": "", "tool_error": "", "load_notes": ()}
_NUMBER_BYTES, _METRIC_BYTES = 40, 160
"""Estimated bytes of memory in CPython: of a number in a tuple (_NUMBER_BYTES), and of a metric with its name (_METRIC_BYTES)."""
_NUMBERS_OF_A_REWARD = 12
"""Memory of a turn's reward, a small object, as a multiple of the memory of a number."""


class EpisodeInvalid(Permanent):
    """A stored message is not an episode that a sandbox of this platform could have written. Its job fails."""


class EpisodesTooLarge(Permanent):
    """A job's episodes need more of the orchestrator's memory than `open_groups.MAX_KEPT_BYTES`."""


def read_episode(stored: Stored, document: JobDocument) -> Episode | None:
    """Parse and validate an episode; None if it belongs to an earlier job of this name.

    Raises EpisodeInvalid, UnsupportedSchema.
    """
    try:
        episode = decode_as(Episode, stored.data)
    except BadMessage:
        raise EpisodeInvalid(_sentence(stored, "it is not an episode")) from None
    if (episode.namespace, episode.job) != (document.namespace, document.job):
        raise EpisodeInvalid(_sentence(stored, f"it names the job {episode.ref}"))
    if episode.uid != document.uid:
        return None
    if (fault := _fault(episode, document)) is not None:
        raise EpisodeInvalid(_sentence(stored, fault))
    return episode


def slim(episode: Episode) -> Episode:
    """Return a copy of an episode without the parts that decisions, usage and the samples of evaluations do not need.

    Removed are texts about faults and loading, metrics of a training episode, and the choices of an evaluation episode. Of an evaluation episode's
    conversations, only the last one of each agent stays.
    """
    if episode.split is Split.TRAIN:
        return episode.model_copy(update={**_NO_TEXTS, "metrics": {}})
    last = {agent: leaves[-1:] for agent, leaves in episode.leaves.items()}
    return episode.model_copy(update={**_NO_TEXTS, "leaves": last, "choices": ()})


def kept_bytes(episode: Episode) -> int:
    """Return an estimate of the bytes of memory that an episode takes: its turn numbers, rewards of turns and candidates, and metrics."""
    numbers = sum(map(len, episode.leaves.values()))
    numbers += sum(len(choice.turns) + len(choice.rewards) for choice in episode.choices)
    numbers += _NUMBERS_OF_A_REWARD * sum(map(len, episode.turn_rewards.values()))
    return _NUMBER_BYTES * numbers + _METRIC_BYTES * len(episode.metrics)


def _sentence(stored: Stored, fault: str) -> str:
    return (
        f"message {stored.sequence} on {stored.subject} was not written by a sandbox of this platform: {fault[:200]}. Its author has this "
        "job's sandbox credential: check the code that runs in the job's sandboxes"
    )


def _fault(episode: Episode, document: JobDocument) -> str | None:
    """Return, as text, the first inconsistent name or impossible number of an episode; None if the episode is valid."""
    group, spec = episode.group, document.spec
    try:
        token = group_token(group)
    except ValueError as error:
        return str(error)
    if group != f"{document.uid}-{token}" or not _is_of(token, episode, spec.evaluation.num_tasks):
        return f"group {group!r} with split {episode.split} and index {episode.index}"
    if not 0 <= episode.member < (size := spec.sampling(group).group_size):
        return f"member {episode.member} of a group of {size}"
    if not is_attempt(episode.episode, group, episode.member):
        return f"episode {episode.episode!r} of member {episode.member} of group {group!r}"
    found = _worth(episode, document) or _conversations(episode, document)
    return found or _choices(episode, document) or _accounts(episode, document)


def _is_of(token: str, episode: Episode, num_evaluated: int) -> bool:
    """Return whether the name of an episode's group fits the episode's split and index.

    The name of a training group begins with `t`, and any index >= 0 fits. The name of an evaluation group contains the index.

    Args:
        token: the group's name without the job's uid: `t<number>`, or `e<index>v<version>`.
        num_evaluated: number of the job's evaluation tasks.
    """
    if episode.split is Split.TRAIN:
        return token.startswith("t") and episode.index >= 0
    return token.startswith(f"e{episode.index}v") and 0 <= episode.index < num_evaluated


def _worth(episode: Episode, document: JobDocument) -> str | None:
    agents = {agent.name for agent in document.spec.agents}
    wanted = {agent.name for agent in document.spec.agents if agent.trainable}
    if episode.fault is None and not wanted <= episode.rewards.keys():
        return f"no reward for {', '.join(sorted(wanted - episode.rewards.keys()))}"
    if len(set(episode.may_speak)) < len(episode.may_speak):
        return f"{len(episode.may_speak)} agents that the task may call, some of them twice"
    if strangers := {*episode.rewards, *episode.leaves, *episode.may_speak} - agents:
        return f"rewards or conversations of {min(strangers)[:63]!r}, which is not an agent of the job"
    if uncalled := [agent for agent in episode.leaves if not episode.may_call(agent)]:
        return f"conversations of {uncalled[0]!r}, which the task may not call"
    if not all(abs(number) <= MAX_NUMBER for number in (*episode.rewards.values(), *episode.metrics.values())):
        return f"a reward or metric that is not a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}"
    num_characters = max(len(episode.fault_text), len(episode.tool_error), sum(map(len, episode.load_notes)))
    if len(episode.metrics) > MAX_METRICS or num_characters > MAX_FAULT_CHARACTERS:
        return f"{len(episode.metrics)} metrics and {num_characters} characters about a fault"
    unreadable = (name for name in episode.metrics if len(name) > MAX_METRIC_NAME or not name.isprintable())
    return next((f"a metric named {name!r}" for name in unreadable), None)


def _conversations(episode: Episode, document: JobDocument) -> str | None:
    most, end = MAX_TURNS_FACTOR * document.spec.rollout.max_turns, end_of_turns(len(document.spec.agents))
    for agent, leaves in episode.leaves.items():
        if not len(set(leaves)) == len(leaves) <= most or not all(0 <= leaf < end for leaf in leaves):
            return f"{len(leaves)} conversations of agent {agent[:63]!r} that end at turns {leaves[:5]}, at maxTurns {document.spec.rollout.max_turns}"
    for agent, rewards in episode.turn_rewards.items():
        turns = [one.turn for one in rewards]
        is_worth = all(abs(one.reward) <= MAX_NUMBER for one in rewards)
        if agent not in episode.leaves or len(turns) > most or turns != sorted(set(turns)) or not is_worth:
            return f"{len(turns)} rewards of turns of agent {agent[:63]!r}, of which some are no numbers or are not in order"
    return None


def _choices(episode: Episode, document: JobDocument) -> str | None:
    agents = {agent.name for agent in document.spec.agents}
    most, end = MAX_TURNS_FACTOR * document.spec.rollout.max_turns, end_of_turns(len(agents))
    turns = [(choice.agent, turn) for choice in episode.choices for turn in choice.turns]
    if len(set(turns)) < len(turns) or len(turns) > most * len(agents):
        return f"{len(turns)} candidates, some of them twice, or more than {most} of an agent"
    for choice in episode.choices:
        if choice.agent not in agents or not choice.turns or not all(0 <= turn < end for turn in choice.turns):
            return f"candidates of agent {choice.agent[:63]!r} at turns {choice.turns[:5]}"
        if len(choice.rewards) not in (0, len(choice.turns)):
            return f"{len(choice.rewards)} rewards for {len(choice.turns)} candidates"
        if not all(abs(reward) <= MAX_NUMBER for reward in choice.rewards):
            return f"a candidate's reward that is not a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}"
    return None


def _accounts(episode: Episode, document: JobDocument) -> str | None:
    """Return a text about the first impossible number of turns, tokens, faults or seconds, or digest, of an episode; None if all are valid."""
    end = MAX_TURNS_FACTOR * document.spec.rollout.max_turns * len(document.spec.agents)
    if not 0 <= episode.num_turns <= end or len(episode.prior_faults) > MAX_PRIOR_FAULTS:
        return f"{episode.num_turns} turns after {len(episode.prior_faults)} faults"
    if (
        not 0 <= episode.num_overtime <= episode.num_cut <= episode.num_turns
        or not 0 <= episode.num_tokens <= MAX_TOKENS
        or max(len(episode.prompt), len(episode.answer), len(episode.data_digest)) > 64
        or not (episode.data_digest.isalnum() or not episode.data_digest)
    ):
        return f"{episode.num_tokens} tokens and {episode.num_cut} cut replies of {episode.num_turns}, or a digest that is none"
    if not all(0.0 <= seconds <= MAX_SECONDS for seconds in (episode.duration_s, episode.tool_s)):
        return f"a time of {episode.duration_s} s with {episode.tool_s} s in tools"
    return None
