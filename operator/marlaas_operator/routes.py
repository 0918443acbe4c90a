"""Which objects to look at when something changed. Pure but for asking who belongs to whom."""

from collections.abc import Iterator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import MODELPOOLS, PODS, RLJOBS, TENANTS, target_of
from marlaas_operator.pod_facts import pod_facts
from marlaas_operator.watched import Watched, namespaces_of, pool_of

Wish = tuple[Target, float]
"""What to look at, after how many seconds: what sums up many objects waits for more of them."""

SUMS_AFTER_S = 1.0


def after_change(watched: Watched, target: Target, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """What a change of an object in the cluster may concern."""
    if target.resource == RLJOBS:
        yield target, 0.0
        if _meant(before) != _meant(after):
            yield from sums(watched, before, after)
    elif target.resource == MODELPOOLS:
        yield target, 0.0
        if _meant(before) != _meant(after):
            yield from jobs_of_pool(watched, target.name)
    elif target.resource == TENANTS:
        if _meant(before) != _meant(after):
            yield from jobs_of_tenant(watched, before, after)
        yield from ((target_of(tenant), 0.0) for tenant in watched.all(TENANTS))
    else:
        yield from _owners(watched, target, before, after)


def after_bus_change(watched: Watched, key: str) -> Iterator[Wish]:
    """What a change of a job's document or progress may concern."""
    namespace, _, name = key.partition(".")
    target = Target(RLJOBS, namespace, name)
    body = watched.get(target)
    if body is not None:
        yield target, 0.0
        yield from sums(watched, body, None)


def sums(watched: Watched, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """The pools and tenants in whose status a job counts."""
    for body in (before, after):
        if body is not None:
            yield Target(MODELPOOLS, "", pool_of(body)), SUMS_AFTER_S
            namespace = body["metadata"]["namespace"]
            for tenant in watched.all(TENANTS):
                if namespace in namespaces_of(tenant):
                    yield target_of(tenant), SUMS_AFTER_S


def jobs_of_pool(watched: Watched, name: str) -> Iterator[Wish]:
    """Every job that names a pool."""
    return ((target_of(job), 0.0) for job in watched.group(("jobs of pool", "", name)))


def jobs_of_tenant(watched: Watched, before: Body | None, after: Body | None) -> Iterator[Wish]:
    """Every job whose weight may have changed with a Tenant."""
    bodies = [body for body in (before, after) if body is not None]
    namespaces = {namespace for body in bodies for namespace in namespaces_of(body)}
    return ((target_of(job), 0.0) for job in watched.all(RLJOBS) if job["metadata"]["namespace"] in namespaces)


def _owners(watched: Watched, target: Target, before: Body | None, after: Body | None) -> Iterator[Wish]:
    if target.resource == PODS and before is not None and after is not None and pod_facts(before) == pod_facts(after):
        return
    for body in (before, after):
        for what, namespace, name in watched.groups_of(target, body) if body is not None else ():
            if what == "job":
                yield Target(RLJOBS, namespace, name), 0.0
            elif what == "pool":
                yield Target(MODELPOOLS, "", name), 0.0
                if target.resource == PODS:
                    yield from jobs_of_pool(watched, name)


def _meant(body: Body | None) -> object:
    """What a person or a controller changed, as against what was merely reported."""
    if body is None:
        return None
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), meta.get("deletionTimestamp")
