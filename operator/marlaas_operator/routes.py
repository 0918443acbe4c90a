"""Mapping from a changed object or bus key to the objects to reconcile. Pure, except for lookups in the cache."""

from collections.abc import Iterator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import MODELPOOLS, PODS, RLJOBS, TENANTS, target_of
from marlaas_operator.object_cache import ObjectCache, namespaces_of, pool_of
from marlaas_operator.pod_facts import pod_facts

Wish = tuple[Target, float]
"""An object to reconcile, and the delay in seconds. Objects with totals of many wait, to take several changes at
once.
"""

SUMS_AFTER_S = 1.0


def after_change(cache: ObjectCache, target: Target, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """Yield the objects that a change in the cluster may affect."""
    if target.resource == RLJOBS:
        yield target, 0.0
        if _meant(before) != _meant(after):
            yield from sums(cache, before, after)
    elif target.resource == MODELPOOLS:
        yield target, 0.0
        if _meant(before) != _meant(after):
            yield from jobs_of_pool(cache, target.name)
    elif target.resource == TENANTS:
        if _meant(before) != _meant(after):
            yield from jobs_of_tenant(cache, before, after)
        yield from ((target_of(tenant), 0.0) for tenant in cache.all(TENANTS))
    else:
        yield from _owners(cache, target, before, after)


def after_bus_change(cache: ObjectCache, key: str) -> Iterator[Wish]:
    """Yield the objects that a change of a job's document or progress may affect."""
    namespace, _, name = key.partition(".")
    target = Target(RLJOBS, namespace, name)
    body = cache.get(target)
    if body is not None:
        yield target, 0.0
        yield from sums(cache, body, None)


def sums(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """Yield the pools and tenants whose status counts a job."""
    for body in (before, after):
        if body is not None:
            yield Target(MODELPOOLS, "", pool_of(body)), SUMS_AFTER_S
            namespace = body["metadata"]["namespace"]
            for tenant in cache.all(TENANTS):
                if namespace in namespaces_of(tenant):
                    yield target_of(tenant), SUMS_AFTER_S


def jobs_of_pool(cache: ObjectCache, name: str) -> Iterator[Wish]:
    """Return every job that names a pool."""
    return ((target_of(job), 0.0) for job in cache.group(("jobs of pool", "", name)))


def jobs_of_tenant(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """Return every job whose weight may have changed with a Tenant."""
    bodies = [body for body in (before, after) if body is not None]
    namespaces = {namespace for body in bodies for namespace in namespaces_of(body)}
    return ((target_of(job), 0.0) for job in cache.all(RLJOBS) if job["metadata"]["namespace"] in namespaces)


def _owners(cache: ObjectCache, target: Target, before: Body | None, after: Body | None) -> Iterator[Wish]:
    if target.resource == PODS and before is not None and after is not None and pod_facts(before) == pod_facts(after):
        return
    for body in (before, after):
        for what, namespace, name in cache.groups_of(target, body) if body is not None else ():
            if what == "job":
                yield Target(RLJOBS, namespace, name), 0.0
            elif what == "pool":
                yield Target(MODELPOOLS, "", name), 0.0
                if target.resource == PODS:
                    yield from jobs_of_pool(cache, name)


def _meant(body: Body | None) -> object:
    """Return uid, generation and deletion time, which change with the spec or a deletion but not with the status."""
    if body is None:
        return None
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), meta.get("deletionTimestamp")
