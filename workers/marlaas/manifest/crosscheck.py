"""Checks across objects: referenced names exist, names are unique, and specs are compatible."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas.manifest.findings import Finding, Placed
from marlaas.manifest.references import adapter_problems, export_problems
from marlaas_api.kinds import Kind, ModelPool, RLJob, Tenant
from marlaas_api.kinds.checks import (
    check_cluster,
    check_fit,
    check_local,
    check_local_pool,
    check_supported,
    check_supported_pool,
    cluster_remarks,
    pool_remarks,
    pool_text,
    remarks,
)
from marlaas_api.kinds.fields import did_you_mean, nearest
from marlaas_api.kinds.problems import Loc, Problem

_NAMESPACE = ("metadata", "namespace")


@dataclass(frozen=True, slots=True)
class ManifestObjects:
    """Objects by kind, in the order of the files."""

    pools: tuple[Placed[ModelPool], ...]
    tenants: tuple[Placed[Tenant], ...]
    jobs: tuple[Placed[RLJob], ...]


def distinct(placed: Iterable[Placed[Kind]]) -> list[Placed[Kind]]:
    """Return the objects without the pools and tenants that a later file repeats as they are.

    The file of `marlaas submit` names its pool again, and the run is continued with all of its files.
    """
    found: list[Placed[Kind]] = []
    for here in placed:
        if isinstance(here.object, RLJob) or all(here.object != there.object for there in found):
            found.append(here)
    return found


def duplicates(placed: Sequence[Placed[Kind]]) -> Iterator[Finding]:
    """Yield a finding for each object with the same identity as an earlier one."""
    first: dict[tuple[str, str, str], Placed[Kind]] = {}
    for here in placed:
        meta, kind = here.object.metadata, type(here.object).__name__
        namespace = meta.namespace if isinstance(here.object, RLJob) else ""
        there = first.setdefault((kind, namespace, meta.name), here)
        if there is not here:
            name = f"{namespace}/{meta.name}" if namespace else meta.name
            yield here.source.finding(
                Problem(("metadata", "name"), f"{kind} '{name}' is already defined at {there.place}")
            )


def claims(tenants: Iterable[Placed[Tenant]]) -> Iterator[Finding]:
    """Yield a finding for each namespace that an earlier Tenant already claims."""
    owners: dict[str, Placed[Tenant]] = {}
    for here in tenants:
        for at, namespace in enumerate(here.object.spec.namespaces):
            owner = owners.setdefault(namespace, here)
            if owner is not here:
                text = (
                    f"namespace '{namespace}' already belongs to Tenant '{owner.object.metadata.name}' ({owner.place})"
                )
                yield here.source.finding(Problem(("spec", "namespaces", at), text))


def refusals(contents: ManifestObjects, runnable: bool) -> Iterator[Finding]:
    """Yield unsupported settings; if `runnable`, also those that `marlaas run` does not support."""
    for job in contents.jobs:
        yield from job.source.findings(check_supported(job.object))
        if runnable:
            yield from job.source.findings(check_local(job.object))
            yield from job.source.findings(adapter_problems(job.object))
    yield from export_problems(contents.jobs, runnable)
    for pool in contents.pools:
        yield from pool.source.findings(check_supported_pool(pool.object))
        yield from pool.source.findings(check_local_pool(pool.object) if runnable else ())


def misfits(contents: ManifestObjects, unknown: Mapping[str, bool], runnable: bool) -> Iterator[Finding]:
    """Yield jobs that do not fit one of their pools, and jobs of which a missing pool is an error in `unknown`.

    For a cluster, a job without a namespace is not checked against the pool's namespaces: `-n` or the context
    supplies it at submission.
    """
    pools = by_name(contents.pools)
    for job in contents.jobs:
        is_placed = runnable or "namespace" in job.object.metadata.model_fields_set
        for name in job.object.spec.pools:
            if name in pools:
                problems = check_fit(job.object, pools[name])
                yield from job.source.findings(one for one in problems if is_placed or one.loc != _NAMESPACE)
            elif unknown.get(name, False):
                hint = did_you_mean(name, pools) or "; add the file that defines it"
                text = f"no {pool_text(job.object, name)} in these files{hint}"
                yield job.source.finding(Problem(_named_at(job.object, name), text))


def unknown_pools(contents: ManifestObjects, broken: set[tuple[str, str]], runnable: bool) -> dict[str, bool]:
    """Return the pools that jobs name and the files lack, each with whether that is an error.

    The cluster may have a missing pool. A name similar to that of a pool in the files is always an error.
    """
    pools = by_name(contents.pools)
    names = {name for job in contents.jobs for name in job.object.spec.pools} - set(pools)
    return {name: runnable or nearest(name, pools) is not None for name in names if ("ModelPool", name) not in broken}


def advice(contents: ManifestObjects, runnable: bool) -> Iterator[Finding]:
    """Yield notes that apply wherever the jobs run."""
    pools = by_name(contents.pools)
    for job in contents.jobs:
        known = [pools[name] for name in job.object.spec.pools if name in pools]
        yield from job.source.findings(remarks(job.object, known))
        yield from job.source.findings(() if runnable else _laptops(job.object))
    for pool in contents.pools:
        yield from pool.source.findings(_demand(pool.object, [job.object for job in contents.jobs]))


def local_advice(contents: ManifestObjects, unknown: Mapping[str, bool], runnable: bool) -> Iterator[Finding]:
    """Yield notes about settings that `marlaas run` ignores, and about pools that are not in these files.

    If not `runnable`, also yield the problems that would prevent a local run.
    """
    for pool in contents.pools:
        yield from pool.source.findings(check_local_pool(pool.object))
        yield from pool.source.findings(pool_remarks(pool.object))
    for job in contents.jobs:
        yield from job.source.findings(check_local(job.object))
        yield from job.source.findings(cluster_remarks(job.object))
        yield from job.source.findings(() if runnable else adapter_problems(job.object))
        for name in job.object.spec.pools:
            if unknown.get(name) is False:
                text = f"{pool_text(job.object, name)} is not in these files; the job is not checked against it"
                yield job.source.finding(Problem(_named_at(job.object, name), text))


def _named_at(job: RLJob, pool: str) -> Loc:
    """Return where a job names a pool first: in its own poolRef, or in that of an agent."""
    if pool == job.spec.pool_ref.name:
        return "spec", "poolRef", "name"
    return "spec", "agents", job.spec.agents_on(pool)[0][0], "poolRef", "name"


def _laptops(job: RLJob) -> Iterator[Problem]:
    """Yield settings that `marlaas run` supports and a cluster does not: a hub or bucket without Secret, modules beside the manifest, export folders, TensorBoard."""
    export = job.spec.export
    yield from check_cluster(job)
    for key, given in (("path", export.path), ("trackers", "tensorboard" in export.trackers)):
        if given:
            what = "tensorboard writes files, so only `marlaas run`" if key == "trackers" else "only `marlaas run`"
            yield Problem(("spec", "export", key), f"{what} supports it; a cluster ignores it")
    suites = enumerate(job.spec.evaluation.suites)
    own: list[tuple[Loc, str]] = [(("spec", "environment", "name"), job.spec.environment.name or "")]
    own += [
        (("spec", "evaluation", "suites", at, "environment", "name"), suite.environment.name)
        for at, suite in suites
        if suite.environment
    ]
    for loc, name in own:
        if ":" not in name or name.startswith("marlaas.") or job.spec.environment.image is not None:
            continue
        text = (
            f"a cluster's sandboxes look for '{name}' in the worker image, not beside this file; build an image with it "
            "(environment.image and entrypoint: docs/reference/environments.md)"
        )
        yield Problem(loc, text)


def _demand(pool: ModelPool, jobs: Sequence[RLJob]) -> Iterator[Problem]:
    """Yield notes on a pool that no job uses, or whose jobs have more agents than it admits."""
    name, rollout = pool.metadata.name, pool.spec.rollout
    most = pool.spec.adapter_slots * rollout.replicas * rollout.agents_per_slot
    users = [job for job in jobs if name in job.spec.pools]
    if jobs and not users:
        yield Problem(("metadata", "name"), f"no job in these files uses ModelPool '{name}'")
    agents = sum(job.spec.pool_of(agent) == name for job in users for agent in job.spec.pinned)
    if agents > most:
        text = f"{len(users)} jobs of ModelPool '{name}' have {agents} agents and it admits {most} (adapterSlots x replicas x agentsPerSlot): some will be queued"
        yield Problem(("spec", "adapterSlots"), text)


def by_name(pools: Iterable[Placed[ModelPool]]) -> dict[str, ModelPool]:
    """Return the pools by name."""
    return {pool.object.metadata.name: pool.object for pool in pools}
