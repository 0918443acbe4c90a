"""Identities, and the names derived from them: this module makes every name of an engine adapter, a blob or a group.

Invariant: a name contains the whole identity (namespace, job, uid, ...). Therefore objects of two tenants, two jobs
that reuse one name, and two versions of one adapter never share a name, and a name is never reused.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_TENANT = "tenant/default"
"""The tenant of all namespaces that no Tenant lists: they have weight 1 together. No Tenant has this name: names of Tenants have no slash."""
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_HELD_OUT_SHARE = 8
_NUMBER = "[0-9]{1,18}"
_MAX_ATTEMPT_DIGITS = 12
PREEMPTION_STRIDE = 10**6
"""Attempts after the n-th preemption of their job are counted from n times this number, which attempts before it do not reach."""
_GROUP = re.compile(rf".+-(t{_NUMBER}|e{_NUMBER}v{_NUMBER})")


class Split(StrEnum):
    """The set that a task belongs to: training or held-out."""

    TRAIN = "train"
    EVAL = "eval"


MAX_STOPS, MAX_STOP_TEXT = 16, 64
"""Most strings that end a reply, and their most characters."""


class StopReason(StrEnum):
    """Why a reply ended: an end token, a string of `rollout.stop` or of the request, the token budget, or the context window."""

    STOP = "stop"
    MATCH = "match"
    LENGTH = "length"
    CONTEXT = "context"


def hub_repository(repository: str, agent: str, num_trained: int) -> str:
    """Return the hub's repository of an agent's adapter, of a job with `num_trained` trained agents whose `export.hub.repo` this is."""
    return repository if num_trained == 1 else f"{repository}-{agent}"


def export_folder(base: str, agent: str, num_trained: int) -> str:
    """Return the folder or URL of an agent's adapter, likewise below that of `export.s3` or `export.volume`."""
    return base if num_trained == 1 else f"{base}/{agent}"


@dataclass(frozen=True, slots=True, order=True)
class JobRef:
    """Identity of one RLJob. The uid separates a job from an earlier one of the same name."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        """KV key and display name, `<namespace>.<name>`."""
        return f"{self.namespace}.{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class AgentRef:
    """Identity of one agent of a job."""

    job: JobRef
    name: str

    def adapter(self, version: int) -> "AdapterRef":
        """Return the identity of one of its versions."""
        return AdapterRef(self.job.namespace, self.job.name, self.job.uid, self.name, version)


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """Identity of one version of one agent's adapter; version 0 is the initial one."""

    namespace: str
    job: str
    uid: str
    agent: str
    version: int

    @property
    def job_ref(self) -> JobRef:
        """The job."""
        return JobRef(self.namespace, self.job, self.uid)

    @property
    def agent_ref(self) -> AgentRef:
        """The agent."""
        return AgentRef(self.job_ref, self.agent)

    @property
    def engine_name(self) -> str:
        """The adapter's name in an engine. It is never reused, so that prefix caches cannot become stale."""
        return f"{self.namespace}.{self.job}.{self.uid}.{self.agent}@v{self.version}"

    @property
    def blob_prefix(self) -> str:
        """Folder of the version's files in the blob store."""
        return f"{agent_prefix(self.job_ref, self.agent)}/v{self.version}"

    def at(self, version: int) -> "AdapterRef":
        """Return the same agent's adapter at another version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, version)

    def __str__(self) -> str:
        return self.engine_name


def job_prefix(job: JobRef) -> str:
    """Return the folder of a job in the blob store; it holds everything that the job owns."""
    return f"{job.namespace}/{job.name}/{job.uid}"


def agent_prefix(job: JobRef, agent: str) -> str:
    """Return the folder of a job's agent in the blob store; it holds everything that the agent owns."""
    return f"{job_prefix(job)}/{agent}"


def eval_index(group: str) -> int | None:
    """Return the index of an evaluation's group; None for a training group. Raises ValueError if `group` is not a group name."""
    token = group_token(group)
    return int(token[1:].partition("v")[0]) if token.startswith("e") else None


def train_group(job: JobRef, index: int) -> str:
    """Return the name of the group of the training task with this index; each index is used for one group only."""
    return f"{job.uid}-t{index}"


def eval_group(job: JobRef, index: int, version: int) -> str:
    """Return the name of the group of a held-out task, evaluated at this version. index: among the tasks of all suites."""
    return f"{job.uid}-e{index}v{version}"


def episode_id(group: str, member: int, attempt: int) -> str:
    """Return the name of one attempt at a group's member; attempts (claims or retries) are counted from 1."""
    return f"{group}-{member}-{attempt}"


def is_attempt(episode: str, group: str, member: int) -> bool:
    """Return whether `episode` is the name of an attempt of a group's member."""
    prefix = episode_id(group, member, 0)[:-1]
    number = episode.removeprefix(prefix)
    return episode.startswith(prefix) and len(number) <= _MAX_ATTEMPT_DIGITS and number.isascii() and number.isdigit()


def attempt_of(episode: str) -> int:
    """Return the number of the attempt that an episode's name ends with."""
    return int(episode.rpartition("-")[2])


def request_id(episode: str, turn: int) -> str:
    """Return the name of a generation request; requests with the same name generate once."""
    return f"{episode}.{turn}"


BRANCH_TURNS = 1 << 14
"""Numbers of an agent's turns in one branch of an episode; `rollout.maxTurns` is less."""
MAX_BRANCHES = 1 << 10
"""Branches of one episode: parts that run at the same time as others, and the main line after each group of them."""
MAX_TURNS_FACTOR = 16
"""An agent has at most this many times `rollout.maxTurns` turns in an episode. Only parts that run at the same time get beyond one."""


def turn_number(own: int, position: int, num_agents: int) -> int:
    """Return the number of a turn in its episode.

    It depends on the agent and on the agent's own turns, never on the order of arrival. A job with one agent counts from 0.

    Args:
        own: number of the turn among the agent's own: in the b-th branch of the episode they count from b * BRANCH_TURNS.
            Branches are numbered in the order in which the environment declares them; an episode begins in branch 0.
        position: of the agent in the manifest.
        num_agents: of the job.
    """
    return own * num_agents + position


def is_measured(turn: int, num_agents: int) -> bool:
    """Return whether a turn of a demonstrated episode is of a held-out demonstration: of the branches after the first.

    Such turns are measured, and never trained.
    """
    return turn >= BRANCH_TURNS * num_agents


def end_of_turns(num_agents: int) -> int:
    """Return the number after the largest turn number of an episode."""
    return (1 + MAX_BRANCHES) * BRANCH_TURNS * num_agents


SCORES = 1 << 31
"""More than any turn's number. The record of a teacher's scores has the number of the scored turn, raised by this."""


def is_score(number: int) -> bool:
    """Return whether the number of a turn's record is that of a teacher's scores."""
    return number >= SCORES


def sampling_seed(job_seed: int, num_agents: int, group: str, member: int, turn: int) -> int:
    """Return the seed of a turn. The job's first agent uses the job's seed, each other one a seed of its own.

    Raises:
        ValueError: `group` is not a group name.
    """
    own, position = divmod(turn, num_agents)
    seed = job_seed if position == 0 else derive_seed(job_seed, "agent", position)
    return derive_seed(seed, group_token(group), member, own)


def derive_seed(job_seed: int, *parts: object) -> int:
    """Return a 63-bit seed from the job's seed and the name of the value to draw.

    It does not depend on uid, attempt, replica or time, so a replay draws the same values.
    """
    text = "/".join(str(part) for part in (job_seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def split_of(text: str) -> Split:
    """Return the split of a task with this text, independent of any seed: one text in eight is held out.

    The hash is cryptographic: under a checksum, texts that differ in a few digits can all fall into one split.
    """
    first = hashlib.sha256(text.encode()).digest()[0]
    return Split.TRAIN if first % _HELD_OUT_SHARE else Split.EVAL


def digest_of(*texts: str) -> str:
    """Return a short digest of texts, to compare the tasks of a job: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)} ".encode() + text.encode(errors="surrogatepass"))
    return found.hexdigest()[:16]


def group_token(group: str) -> str:
    """Return a group's name without its uid (`t12`, `e3v5`), as used in seeds and for people.

    Raises:
        ValueError: `group` is not a group name.
    """
    match = _GROUP.fullmatch(group)
    if match is None:
        raise ValueError(f"not a group name: {group[:200]!r}")
    return match[1]
