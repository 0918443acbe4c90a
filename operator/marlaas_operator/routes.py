"""Which objects to look at when something changed. Pure but for asking who belongs to whom."""

from collections.abc import Iterator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import MODELPOOLS, PODS, RLJOBS, TENANTS, target_of
from marlaas_operator.object_cache import ObjectCache, namespaces_of, pool_of
from marlaas_operator.pod_facts import pod_facts

Wish = tuple[Target, float]
"""What to look at, after how many seconds: what sums up many objects waits for more of them."""

SUMS_AFTER_S = 1.0


def after_change(cache: ObjectCache, target: Target, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """What a change of an object in the cluster may concern."""
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
    """What a change of a job's document or progress may concern."""
    namespace, _, name = key.partition(".")
    target = Target(RLJOBS, namespace, name)
    body = cache.get(target)
    if body is not None:
        yield target, 0.0
        yield from sums(cache, body, None)


def sums(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """The pools and tenants in whose status a job counts."""
    for body in (before, after):
        if body is not None:
            yield Target(MODELPOOLS, "", pool_of(body)), SUMS_AFTER_S
            namespace = body["metadata"]["namespace"]
            for tenant in cache.all(TENANTS):
                if namespace in namespaces_of(tenant):
                    yield target_of(tenant), SUMS_AFTER_S


def jobs_of_pool(cache: ObjectCache, name: str) -> Iterator[Wish]:
    """Every job that names a pool."""
    return ((target_of(job), 0.0) for job in cache.group(("jobs of pool", "", name)))


def jobs_of_tenant(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """Every job whose weight may have changed with a Tenant."""
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
    """What a person or a controller changed, as against what was merely reported."""
    if body is None:
        return None
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), meta.get("deletionTimestamp")
