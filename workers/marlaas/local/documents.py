"""Job documents of a run: read from the manifests, merged with those of earlier runs, checked for fields that must not change."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marlaas.manifest import load
from marlaas.models import inspect
from marlaas.models.cards import Card
from marlaas.models.memory import PoolUse, agent_rooms
from marlaas.models.memory_plan import card_shares, card_shortage
from marlaas_api.documents import job_document, model_source, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, ModelPoolSpec
from marlaas_api.messages import JobDocument, PoolDocument

_APART_S = 1e-3
"""Difference between the creation times of consecutive jobs, so that the queue has the order of the files."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Jobs and pools of a run.

    jobs: with new uids and creation times, which apply to new jobs only.
    pools: only pools that the jobs use.
    folders: by key of a job, the folder of its manifest, in which its modules are searched.
    """

    jobs: tuple[JobDocument, ...]
    pools: tuple[ModelPool, ...]
    folders: dict[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """Memory of this machine for a run. free: bytes that are available; None if trainers measure what they have, as on a GPU."""

    free: int | None = None
    cards: tuple[Card, ...] = ()


def read(files: Sequence[str], seed: int | None) -> DesiredState:
    """Read the manifests. Raises InvalidManifest with all findings."""
    manifest, now = load(files), time.time()
    jobs = tuple(
        job_document(job, manifest.tenants, str(uuid.uuid4()), seed, now + position * _APART_S)
        for position, job in enumerate(manifest.jobs)
    )
    used = {name for job in jobs for name in job.pools}
    return DesiredState(
        jobs,
        tuple(pool for pool in manifest.pools if pool.metadata.name in used),
        {job.ref.key: folder for job, folder in zip(jobs, manifest.folders, strict=True)},
        tuple(str(note) for note in manifest.notes),
    )


def scaled(pools: Iterable[ModelPool], replicas: int | None, trainers: int | None) -> tuple[ModelPool, ...]:
    """Return the pools with these numbers of engines and trainers; None keeps a pool's own."""
    return tuple(pool.model_copy(update={"spec": _scaled(pool.spec, replicas, trainers)}) for pool in pools)


def pool_documents(
    pools: Sequence[ModelPool], paths: Sequence[Path], jobs: Sequence[JobDocument], here: Resources
) -> tuple[PoolDocument, ...]:
    """Return the documents of prepared pools, with the memory that each trainer has for its agents, and the parts of shared cards.

    Args:
        paths: folders of the models.

    Raises:
        InvalidInput: the workers do not fit the cards.
    """
    uses = [_use(pool, path, jobs) for pool, path in zip(pools, paths, strict=True)]
    rooms = [0] * len(pools) if here.free is None else agent_rooms(uses, here.free)
    specs = [pool.spec for pool in pools]
    if here.cards and uses:
        if (text := card_shortage([card.total for card in here.cards], uses)) is not None:
            raise InvalidInput(text)
        shares = card_shares([card.free for card in here.cards], uses)
        specs, rooms = [share.spec for share in shares], [share.agent_room for share in shares]
    return tuple(
        PoolDocument(name=pool.metadata.name, model_path=str(path), spec=pool_spec(spec), agent_room_bytes=room)
        for pool, spec, path, room in zip(pools, specs, paths, rooms, strict=True)
    )


def _use(pool: ModelPool, path: Path, jobs: Iterable[JobDocument]) -> PoolUse:
    agents = [(job.spec, job.agents_on(pool.metadata.name)) for job in jobs]
    return PoolUse(
        inspect(path), pool.spec, [spec.model_copy(update={"agents": here}) for spec, here in agents if here]
    )


def _scaled(spec: ModelPoolSpec, replicas: int | None, trainers: int | None) -> ModelPoolSpec:
    rollout = spec.rollout if replicas is None else spec.rollout.model_copy(update={"replicas": replicas})
    trainer = spec.trainer if trainers is None else spec.trainer.model_copy(update={"replicas": trainers})
    return spec.model_copy(update={"rollout": rollout, "trainer": trainer})


CHANGEABLE = frozenset(
    {"training.steps", "priority", "suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"}
)
"""Fields of a job's spec that may change when it is resumed; steps may only grow."""

_ADVICE = "restore it, or start a run with another --out"


def merge(stored: Sequence[JobDocument], wanted: Sequence[JobDocument]) -> tuple[JobDocument, ...]:
    """Return the documents to run. Resumed jobs keep their uid and creation time; a changed one gets a new generation.

    Raises:
        InvalidInput: a stored job is missing from the manifests, or a field changed that must not; the text names
            the field.
    """
    before = {document.ref.key: document for document in stored}
    _refuse_missing(before, {document.ref.key for document in wanted})
    return tuple(_merged(before.get(document.ref.key), document) for document in wanted)


def _refuse_missing(before: Mapping[str, JobDocument], names: set[str]) -> None:
    missing = [str(document.ref) for key, document in before.items() if key not in names]
    if missing:
        raise InvalidInput(
            f"job {missing[0]} was started in this output folder and is missing from the manifests: "
            "add its manifest, or choose another --out"
        )


def _merged(before: JobDocument | None, wanted: JobDocument) -> JobDocument:
    if before is None:
        return wanted
    _refuse_changes(before, wanted)
    kept = {"uid": before.uid, "generation": before.generation, "created_at": before.created_at}
    same = wanted.model_copy(update=kept)
    if same == before:
        return before
    return same.model_copy(update={"generation": before.generation + 1})


def _refuse_changes(before: JobDocument, wanted: JobDocument) -> None:
    if before.seed != wanted.seed:
        raise InvalidInput(f"job {wanted.ref}: the seed was {before.seed} and is now {wanted.seed}: {_ADVICE}")
    was, now = (document.spec.model_dump(mode="json", by_alias=True) for document in (before, wanted))
    for path, old, new in differences(was, now):
        if path not in CHANGEABLE:
            raise InvalidInput(f"job {wanted.ref}: spec.{path} was {_text(old)} and is now {_text(new)}: {_ADVICE}")
    if wanted.spec.training.steps < before.spec.training.steps:
        raise InvalidInput(
            f"job {wanted.ref}: spec.training.steps was {before.spec.training.steps} and is now "
            f"{wanted.spec.training.steps}: it can only be raised"
        )


def refuse_other_models(stored: Iterable[PoolDocument], wanted: Iterable[ModelPool]) -> None:
    """Raise InvalidInput if a stored pool now has another base model."""
    now = {pool.metadata.name: model_source(pool.spec.model) for pool in wanted}
    for pool in stored:
        if now.get(pool.name, pool.spec.model) != pool.spec.model:
            raise InvalidInput(f"ModelPool {pool.name}: spec.model has changed since the jobs were started: {_ADVICE}")


def differences(before: object, after: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (dotted path, before, after) for every leaf in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield path, before, after


def _text(value: object) -> str:
    return "absent" if value is None else str(value)
