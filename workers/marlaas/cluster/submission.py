"""Submit manifests to a cluster: dry-run every object on the API server, then apply all of them, or none."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from marlaas.cluster.errors import AccessDenied, ObjectMissing, Refused
from marlaas.cluster.kubectl import Kubectl
from marlaas.manifest.findings import Finding, InvalidManifest, Placed, Source
from marlaas_api.kinds import Kind, RLJob
from marlaas_api.kinds.checks import check_cluster
from marlaas_api.kinds.problems import Loc, Problem

_STEP = re.compile(r"\[(?P<index>\d+)\]|\[(?P<key>[^\]]*)\]|(?P<name>[^.\[\]]+)")
_NO_NAMESPACE = re.compile(r'namespaces "(?P<name>[^"]+)" not found')


class Change(StrEnum):
    """Effect of an apply on an object."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Applied:
    """An object that was applied to the cluster."""

    kind: str
    namespace: str
    name: str
    change: Change

    def __str__(self) -> str:
        place = f"{self.namespace}/" if self.namespace else ""
        return f"{self.kind} {place}{self.name}: {self.change}"


def submit(kubectl: Kubectl, placed: Sequence[Placed[Kind]]) -> list[Applied]:
    """Apply all objects. Raises InvalidManifest, before anything is applied, if the API server rejects one in the dry run."""
    previews = preview(kubectl, placed)
    return [
        _applied(dry, kubectl.apply(one.source.body, dry_run=False)) for one, dry in zip(placed, previews, strict=True)
    ]


def preview(kubectl: Kubectl, placed: Sequence[Placed[Kind]]) -> list[dict[str, Any]]:
    """Dry-run every object and return the API server's results. Raises InvalidManifest with all rejections, and with what a cluster's operator refuses."""
    previews: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for one in placed:
        if isinstance(one.object, RLJob):
            findings += one.source.findings(check_cluster(one.object))
        try:
            previews.append(kubectl.apply(one.source.body, dry_run=True))
        except (Refused, AccessDenied, ObjectMissing) as error:
            findings += _findings(one, error)
    if findings:
        raise InvalidManifest(findings)
    return previews


def loc_of(field: str) -> Loc:
    """Parse a field path of the API server, such as `spec.agents[1].name`. `<nil>` is the object's root."""
    if field.startswith("<"):
        return ()
    steps = _STEP.finditer(field)
    return tuple(int(step["index"]) if step["index"] else step["key"] or step["name"] for step in steps)


def _findings(one: Placed[Kind], error: Refused | AccessDenied | ObjectMissing) -> Iterator[Finding]:
    source: Source = one.source
    absent = _NO_NAMESPACE.search(str(error))
    if absent:
        name = absent["name"]
        text = f"namespace {name} does not exist in the cluster; create it: kubectl create namespace {name}"
        yield source.finding(Problem(("metadata", "namespace"), text))
    elif isinstance(error, Refused) and error.causes:
        yield from source.findings(
            Problem(loc_of(field), f"the API server rejects this: {text}") for field, text in error.causes
        )
    elif isinstance(error, AccessDenied) and not isinstance(one.object, RLJob):
        hint = "; if the object exists already, submit only the jobs with --jobs-only"
        yield source.finding(Problem((), f"the API server rejects this: {error}{hint}"))
    else:
        yield source.finding(Problem((), f"the API server rejects this: {error}"))


def _applied(before: dict[str, Any], after: dict[str, Any]) -> Applied:
    meta = after["metadata"]
    same = before["metadata"].get("resourceVersion") == meta["resourceVersion"]
    is_new = before["metadata"].get("uid") != meta["uid"]
    change = Change.UNCHANGED if same else Change.CREATED if is_new else Change.CHANGED
    return Applied(after["kind"], meta.get("namespace", ""), meta["name"], change)
