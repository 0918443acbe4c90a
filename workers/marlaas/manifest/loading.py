"""Load manifests from paths; all errors are reported together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from marlaas.manifest.crosscheck import (
    ManifestObjects,
    advice,
    claims,
    distinct,
    duplicates,
    local_advice,
    misfits,
    refusals,
    unknown_pools,
)
from marlaas.manifest.findings import Finding, InvalidManifest, Placed
from marlaas.manifest.models import cache_rooms, check_models, model_notes, plan_memory
from marlaas.manifest.objects import File, Objects, read_files, read_objects
from marlaas.manifest.references import anchored_job, anchored_pool, check_environments
from marlaas.models.memory_plan import PoolPlan
from marlaas_api.kinds import Kind, ModelPool, RLJob, Tenant


@dataclass(frozen=True, slots=True)
class LoadedManifest:
    """Valid objects, checked individually and together, in the order of the files.

    folders: of the jobs' files, one for each job.
    notes: findings that are not errors; cluster_notes: those that matter for a submission.
    placed: every object with its place and its source.
    cache_rooms: by pool, how many conversations its KV cache holds, if the model is on this machine.
    plans: by pool, the plan of its memory, if the model is on this machine.
    """

    pools: tuple[ModelPool, ...]
    tenants: tuple[Tenant, ...]
    jobs: tuple[RLJob, ...]
    folders: tuple[Path, ...] = ()
    notes: tuple[Finding, ...] = ()
    cluster_notes: tuple[Finding, ...] = ()
    placed: tuple[Placed[Kind], ...] = ()
    cache_rooms: Mapping[str, str] = field(default_factory=dict)
    plans: Mapping[str, PoolPlan] = field(default_factory=dict)


def load(
    paths: Sequence[str | Path], *, runnable: bool = True, card: int | None = None, environments: bool = True
) -> LoadedManifest:
    """Read multi-document YAML files (`-`: standard input) and check them.

    Args:
        runnable: require everything that `marlaas run` needs: a job, each job's pool, and no setting that only a
            cluster supports. If False, missing objects are assumed to be in the cluster.
        environments: check the environments, in a child process that imports them.
        card: bytes of the cards that the workers shall have; a pool that does not fit is an error. None: not given.

    Raises:
        InvalidManifest: all errors, in the order of files and lines.
    """
    labels, objects = _read([str(path) for path in paths])
    given = _sorted_out(objects)
    contents = _anchored(given)
    unknown = unknown_pools(contents, objects.broken, runnable)
    broken_environments, of_environments = check_environments(contents.jobs if environments else ())
    errors = [
        *objects.errors,
        *duplicates(objects.placed),
        *claims(contents.tenants),
        *refusals(contents, runnable),
        *misfits(contents, unknown, runnable),
        *check_models(contents, runnable),
        *broken_environments,
    ]
    if not errors and runnable and not contents.jobs:
        errors.append(Finding("", 0, "", f"no RLJob in {', '.join(labels)}: nothing can be run"))
    plans: dict[str, PoolPlan] = {}
    if not errors:
        plans, too_large = plan_memory(contents, card)
        errors.extend(too_large)
    if errors:
        raise InvalidManifest(_in_order(errors, labels))
    notes = [*objects.notes, *of_environments, *advice(contents, runnable)]
    local = [*local_advice(contents, unknown, runnable), *model_notes(contents, runnable)]
    return replace(
        _manifest(contents if runnable else given, objects.placed),
        notes=tuple(_in_order([*notes, *local], labels)),
        cluster_notes=tuple(_in_order(notes, labels)),
        cache_rooms=cache_rooms(contents),
        plans=plans,
    )


def _read(paths: Sequence[str]) -> tuple[list[str], Objects]:
    objects, labels = Objects(), []
    for item in read_files(paths):
        labels.append(item.label if isinstance(item, File) else item.file)
        if isinstance(item, File):
            read_objects(item, objects)
        else:
            objects.errors.append(item)
    objects.placed = distinct(objects.placed)
    return labels, objects


def _sorted_out(objects: Objects) -> ManifestObjects:
    return ManifestObjects(
        pools=tuple(Placed(here.object, here.source) for here in objects.placed if isinstance(here.object, ModelPool)),
        tenants=tuple(Placed(here.object, here.source) for here in objects.placed if isinstance(here.object, Tenant)),
        jobs=tuple(Placed(here.object, here.source) for here in objects.placed if isinstance(here.object, RLJob)),
    )


def _anchored(given: ManifestObjects) -> ManifestObjects:
    """Return the objects with relative paths of models and adapters read from their manifest's folder, as modules are."""
    return replace(
        given,
        pools=tuple(Placed(anchored_pool(one.object, one.source.folder), one.source) for one in given.pools),
        jobs=tuple(Placed(anchored_job(one.object, one.source.folder), one.source) for one in given.jobs),
    )


def _manifest(contents: ManifestObjects, placed: Sequence[Placed[Kind]]) -> LoadedManifest:
    return LoadedManifest(
        pools=tuple(pool.object for pool in contents.pools),
        tenants=tuple(tenant.object for tenant in contents.tenants),
        jobs=tuple(job.object for job in contents.jobs),
        folders=tuple(job.source.folder for job in contents.jobs),
        placed=tuple(placed),
    )


def _in_order(findings: Iterable[Finding], labels: Sequence[str]) -> list[Finding]:
    """Sort by file, then line, and remove duplicates."""
    return sorted(dict.fromkeys(findings), key=lambda finding: (_rank(finding.file, labels), finding.line))


def _rank(file: str, labels: Sequence[str]) -> int:
    return labels.index(file) if file in labels else len(labels)
