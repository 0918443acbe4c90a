"""In-memory fake of the API server. It ships with the product; tests of the operator run on it.

It implements resource versions, generations, uids, finalizers, the status subresource, and field ownership of
one manager (ours).
"""

import asyncio
import copy
import itertools
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime

from pydantic import BaseModel, ValidationError

from marlaas_api.kinds import ModelPool, RLJob, Tenant
from marlaas_operator.cluster import AlreadyExists, Body, Conflict, Invalid, NotFound, Resource, Target
from marlaas_operator.cluster.ownership import Step, applied, leaves, merged
from marlaas_operator.cluster.resources import NAMESPACES, target_of

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KINDS: dict[str, type[BaseModel]] = {"RLJob": RLJob, "ModelPool": ModelPool, "Tenant": Tenant}
_WITH_STATUS = (*_KINDS, "Deployment", "StatefulSet", "Pod")
_CONDITIONS = ("uid", "resourceVersion")
_NO_GENERATION = ("metadata", "status")

Listener = Callable[[str, Body], None]
"""Called with every change, as a watch event: ADDED, MODIFIED or DELETED, and the object."""


class MemoryCluster:
    """One API server in memory.

    Like the real one, it validates a spec only when it changes, so that an object that predates a rule can
    still get a status and be deleted.

    Attributes:
        calls: every request so far as (verb, target).
        fail: set by tests; returns an error to raise instead of answering.
        now: set by tests; unix seconds.
        checks_rules: set by tests; False accepts specs that break the rules of their kind.
    """

    def __init__(self, *namespaces: str) -> None:
        self._objects: dict[Target, Body] = {}
        self._owned: dict[Target, set[tuple[Step, ...]]] = {}
        self._versions = itertools.count(1)
        self.listeners: list[Listener] = []
        self.now: Callable[[], float] = time.time
        self.calls: list[tuple[str, Target]] = []
        self.fail: Callable[[str, Target], Exception | None] = lambda verb, target: None
        self.checks_rules = True
        for name in ("default", *namespaces):
            self._store(Target(NAMESPACES, "", name), {"apiVersion": "v1", "kind": "Namespace", "metadata": {}})

    async def get(self, target: Target) -> Body:
        await self._arrive("get", target)
        return copy.deepcopy(self._found(target))

    async def list(self, resource: Resource, *, namespace: str = "", labels: str = "") -> list[Body]:
        await self._arrive("list", Target(resource, namespace, ""))
        wanted = dict(part.split("=", 1) for part in labels.split(",") if part)
        return [
            copy.deepcopy(body)
            for target, body in sorted(self._objects.items(), key=lambda pair: (pair[0].namespace, pair[0].name))
            if target.resource == resource
            and namespace in ("", target.namespace)
            and wanted.items() <= body["metadata"].get("labels", {}).items()
        ]

    async def create(self, body: Body) -> Body:
        target = target_of(body)
        await self._arrive("create", target)
        if target in self._objects:
            raise AlreadyExists(f'cannot create {target}: "{target.name}" already exists')
        return self._store(target, copy.deepcopy(body))

    async def apply(self, body: Body) -> Body:
        target = target_of(body)
        await self._arrive("apply", target)
        before = self._objects.get(target)
        _check_conditions(before, body)
        if before is None:
            after = copy.deepcopy(body)
        else:
            after = applied(before, self._owned.get(target, set()), copy.deepcopy(body))
        result = self._store(target, after)
        self._owned[target] = set(leaves(body))
        return result

    async def patch(self, target: Target, patch: Body, *, status: bool = False) -> Body:
        await self._arrive("patch status" if status else "patch", target)
        before = self._found(target)
        _check_conditions(before, patch, ("resourceVersion",) if status else _CONDITIONS)
        if status:
            return self._store(target, {**before, "status": merged(before.get("status"), patch.get("status", {}))})
        kept = {"status": before["status"]} if "status" in before and target.resource.kind in _WITH_STATUS else {}
        return self._store(target, {**merged(before, copy.deepcopy(patch)), **kept})

    async def delete(self, target: Target, *, uid: str | None = None) -> bool:
        await self._arrive("delete", target)
        body = self._objects.get(target)
        if body is None:
            return True
        if uid not in (None, body["metadata"]["uid"]):
            raise Conflict(f"cannot delete {target}: the uid in the precondition is not its uid")
        metadata = {"deletionTimestamp": self._time(), **body["metadata"]}
        self._store(target, {**body, "metadata": metadata})
        return target not in self._objects

    async def close(self) -> None:
        return None

    def _time(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def _arrive(self, verb: str, target: Target) -> None:
        """Begin a call: yield to the event loop, record the call, and raise the error of `fail`, if any."""
        await asyncio.sleep(0)
        self.calls.append((verb, target))
        error = self.fail(verb, target)
        if error is not None:
            raise error

    def _found(self, target: Target) -> Body:
        if target not in self._objects:
            raise NotFound(f'{target}: {target.resource.plural} "{target.name}" not found')
        return self._objects[target]

    def _store(self, target: Target, body: Body) -> Body:
        """Store a changed body and notify the listeners; remove a deleted object without finalizers."""
        before = self._objects.get(target)
        self._check(target, body, before)
        if before is not None and _same(before, body):
            return copy.deepcopy(before)
        version = str(next(self._versions))
        metadata = {**body["metadata"], "name": target.name, "resourceVersion": version}
        if target.namespace:
            metadata["namespace"] = target.namespace
        metadata["uid"] = before["metadata"]["uid"] if before else f"00000000-0000-4000-8000-{int(version):012d}"
        metadata["creationTimestamp"] = before["metadata"]["creationTimestamp"] if before else self._time()
        metadata["generation"] = _generation(before, body)
        stored = {**body, "metadata": metadata}
        if before is None and target.resource.kind in _WITH_STATUS:
            stored.pop("status", None)
        gone = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if gone:
            self._objects.pop(target, None)
            self._owned.pop(target, None)
        else:
            self._objects[target] = stored
        self._tell("DELETED" if gone else "ADDED" if before is None else "MODIFIED", stored)
        return copy.deepcopy(stored)

    def _check(self, target: Target, body: Body, before: Body | None) -> None:
        if target.namespace and Target(NAMESPACES, "", target.namespace) not in self._objects:
            raise NotFound(f'{target}: namespaces "{target.namespace}" not found')
        if not _SUBDOMAIN.fullmatch(target.name):
            raise Invalid(f"{target}: metadata.name: Invalid value: {target.name!r}: a lowercase RFC 1123 subdomain")
        model = _KINDS.get(target.resource.kind)
        changes = before is None or before.get("spec") != body.get("spec")
        if model is not None and changes and self.checks_rules:
            _parse(model, target, body)

    def _tell(self, what: str, body: Body) -> None:
        for listener in list(self.listeners):
            listener(what, copy.deepcopy(body))


def _parse(model: type[BaseModel], target: Target, body: Body) -> None:
    try:
        model.model_validate(body)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise Invalid(
            f'{target.resource.kind} "{target.name}" is invalid: {where}: {error.errors()[0]["msg"]}'
        ) from error


def _check_conditions(before: Body | None, body: Body, fields: tuple[str, ...] = _CONDITIONS) -> None:
    metadata = body.get("metadata", {})
    for field in fields:
        if field in metadata and (before is None or metadata[field] != before["metadata"][field]):
            raise Conflict(f"metadata.{field} is not {metadata[field]}: the object has been modified")


def _same(before: Body, after: Body) -> bool:
    return leaves(_without_marks(before)) == leaves(_without_marks(after))


def _without_marks(body: Body) -> Body:
    marks = ("resourceVersion", "uid", "creationTimestamp", "generation", "name", "namespace", "managedFields")
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key not in marks}}


def _generation(before: Body | None, after: Body) -> int:
    if before is None:
        return 1
    changed = any(before.get(key) != after.get(key) for key in {*before, *after} - {*_NO_GENERATION})
    newly_deleted = "deletionTimestamp" in after["metadata"] and "deletionTimestamp" not in before["metadata"]
    return int(before["metadata"]["generation"]) + (changed or newly_deleted)
