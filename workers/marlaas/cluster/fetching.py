"""Fetch a job's published adapter into a folder, through the orchestrator's pod, which can reach the bus and the blob store."""

import io
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.cluster.errors import AccessDenied, CommandFailed, ObjectMissing
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.views import ClusterJobView
from marlaas.local.folder import replace_folder, translated
from marlaas.manifest.references import CONFIG, TENSORS, objection
from marlaas_api.errors import InvalidInput

ORCHESTRATOR = "app.kubernetes.io/name=marlaas,app.kubernetes.io/component=orchestrator"
_CONTAINER = "orchestrator"
_ITS_OWN = ("--nats", "--blobs", "--creds")
"""Arguments of the orchestrator that select the bus and the blob store."""


@dataclass(frozen=True, slots=True)
class Published:
    """An agent's adapter as the job's status lists it: the promoted version of a succeeded job, else the newest version."""

    agent: str
    version: int
    folder: str


def published(job: ClusterJobView, agent: str | None) -> Published:
    """Return the adapter of the named agent, or of the first agent. Raises InvalidInput if there is none yet."""
    agents = job.status.agents if job.status is not None else ()
    # An agent that plays another one's policy has a version, and no adapter.
    own = [one for one in agents if one.adapter is not None] or agents
    found = next((one for one in (own if agent is None else agents) if agent in (None, one.name)), None)
    if found is None and agent is not None:
        raise InvalidInput(
            f"{job.key} has no agent {agent}; its agents are {', '.join(one.name for one in agents) or 'not known yet'}"
        )
    version = (
        None if found is None else found.policy_version if found.promoted_version is None else found.promoted_version
    )
    if found is None or version is None:
        raise InvalidInput(
            f"{job.key} has no published adapter yet; see kubectl marlaas why {job.name} -n {job.namespace}"
        )
    if found.adapter is None and own is not agents:
        raise InvalidInput(
            f"agent {found.name} of {job.key} plays the policy of another agent; adapters have {', '.join(one.name for one in own)}"
        )
    return Published(found.name, version, found.adapter or "")


def fetch(kubectl: Kubectl, job: ClusterJobView, wanted: Published, target: Path) -> None:
    """Write the adapter as a PEFT folder, completely or not at all.

    Raises:
        AccessDenied: the user may not exec into the pod; the text names the adapter's place in the blob store.
        InvalidInput: the folder holds something else, or pods of several namespaces have the orchestrator's labels.
    """
    why = objection(target)
    if why is not None:
        raise InvalidInput(f"{target} {why}")
    try:
        archive = _archive(kubectl, job, wanted)
    except AccessDenied as error:
        where = f"the adapter is in the blob store under {wanted.folder}, from where the platform team can fetch it"
        raise AccessDenied(f"{error}. {where}") from error
    _unpack(archive, target.resolve())


def _archive(kubectl: Kubectl, job: ClusterJobView, wanted: Published) -> bytes:
    pods = kubectl.list(
        "pods", "--all-namespaces", f"--selector={ORCHESTRATOR}", "--field-selector=status.phase=Running"
    )
    if not pods:
        raise ObjectMissing("no orchestrator pod runs in this cluster: ask the platform team")
    _check_alone(pods)
    who = ("--namespace", job.namespace, "--job", job.name, "--agent", wanted.agent, "--version", str(wanted.version))
    command = ("python3", "-m", "marlaas.cluster.published", *_started_with(pods[0]), *who)
    meta = pods[0]["metadata"]
    return kubectl.exec((meta["namespace"], meta["name"], _CONTAINER), command)


def _check_alone(pods: Sequence[Mapping[str, Any]]) -> None:
    """Reject orchestrator pods in several namespaces.

    Any tenant may put these labels on a pod of their own, which could then send a false adapter.
    """
    namespaces = sorted({str(pod["metadata"]["namespace"]) for pod in pods})
    if len(namespaces) > 1:
        raise InvalidInput(
            f"pods in the namespaces {', '.join(namespaces)} have the orchestrator's labels, and only one of "
            "them is the platform's; nothing was fetched: ask the platform team to remove the others"
        )


def _started_with(pod: Mapping[str, Any]) -> tuple[str, ...]:
    container = next(one for one in pod["spec"]["containers"] if one["name"] == _CONTAINER)
    return tuple(word for word in container.get("args", ()) if word.partition("=")[0] in _ITS_OWN)


def _unpack(archive: bytes, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    with translated(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, data in _whole(archive):
            (partial / name).write_bytes(data)
    replace_folder(partial, target)


def _whole(archive: bytes) -> Sequence[tuple[str, bytes]]:
    """Return all files. Raises CommandFailed for a truncated archive, because kubectl may report a broken connection as success."""
    try:
        files = [*_files(archive)]
    except tarfile.TarError as error:
        raise CommandFailed(
            f"the transfer of the adapter was incomplete ({error}); run the same command again"
        ) from error
    if lacking := {CONFIG, TENSORS} - {name for name, _ in files}:
        raise CommandFailed(
            f"the transfer of the adapter was incomplete: {min(lacking)} is missing; run the same command again"
        )
    return files


def _files(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield plain files with plain names; an adapter has no others."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() and Path(member.name).name == member.name else None
            if file is not None:
                yield member.name, file.read()
