"""Identities and the names derived from them; every name that reaches an engine, a file or a subject is made here.

Invariant: a name carries the whole identity (namespace, job, uid, ...), so two tenants' objects, two generations of one
job and two versions of one adapter never share a name, and a name is never used twice.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_HELD_OUT_SHARE = 8
_NUMBER = "[0-9]{1,18}"
_GROUP = re.compile(rf".+-(t{_NUMBER}|e{_NUMBER}v{_NUMBER})")


class Split(StrEnum):
    """Which tasks: those trained on, or those held out."""

    TRAIN = "train"
    EVAL = "eval"


class StopReason(StrEnum):
    """Why a reply ended: the model's own end token, its token budget, or the context window."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, order=True)
class JobRef:
    """One RLJob. The uid separates a job from an earlier one of the same name."""

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
class AdapterRef:
    """One version of one agent's adapter; version 0 is the initial one."""

    namespace: str
    job: str
    uid: str
    agent: str
    version: int

    @property
    def engine_name(self) -> str:
        """The engine's name for it; unique for ever, which is what keeps prefix caches from going stale."""
        return f"{self.namespace}.{self.job}.{self.uid}.{self.agent}@v{self.version}"

    @property
    def blob_prefix(self) -> str:
        """Folder of its files in the blob store."""
        return f"{agent_prefix(JobRef(self.namespace, self.job, self.uid), self.agent)}/v{self.version}"

    def at(self, version: int) -> "AdapterRef":
        """Return the same agent's adapter at another version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, version)

    def __str__(self) -> str:
        return self.engine_name


def job_prefix(job: JobRef) -> str:
    """Folder of everything that a job owns in the blob store."""
    return f"{job.namespace}/{job.name}/{job.uid}"


def agent_prefix(job: JobRef, agent: str) -> str:
    """Folder of everything that an agent of a job owns in the blob store."""
    return f"{job_prefix(job)}/{agent}"


def train_group(job: JobRef, index: int) -> str:
    """Name of the group of the training task with this index; an index is used for one group only."""
    return f"{job.uid}-t{index}"


def eval_group(job: JobRef, index: int, version: int) -> str:
    """Name of the group of the held-out task with this index, evaluated at this version."""
    return f"{job.uid}-e{index}v{version}"


def episode_id(group: str, member: int, attempt: int) -> str:
    """Name of one play of a group's member; an attempt is one claim or retry, counted from 1."""
    return f"{group}-{member}-{attempt}"


def request_id(episode: str, turn: int) -> str:
    """Name of a generation request; asking twice with one name generates once."""
    return f"{episode}.{turn}"


def derive_seed(job_seed: int, *parts: object) -> int:
    """Return a 63-bit seed from the job's seed and the name of what is to be drawn.

    Independent of uid, attempt, replica and time: a replay draws the same.
    """
    text = "/".join(str(part) for part in (job_seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def split_of(text: str) -> Split:
    """Return the split to which a task with this text belongs, whatever the seeds: one text in eight is held out.

    By a cryptographic hash: of a checksum, texts that differ in a few digits can all fall to one side.
    """
    first = hashlib.sha256(text.encode()).digest()[0]
    return Split.TRAIN if first % _HELD_OUT_SHARE else Split.EVAL


def group_token(group: str) -> str:
    """Return a group's name without its uid (`t12`, `e3v5`): what seeds and people go by.

    Raises:
        ValueError: not a group name.
    """
    match = _GROUP.fullmatch(group)
    if match is None:
        raise ValueError(f"not a group name: {group[:200]!r}")
    return match[1]
