"""Fetch a job's published adapter into a folder, through the orchestrator's pod, which can reach the bus and the blob store."""

import io
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marlaas.adapter_folder import CONFIG, TENSORS, objection
from marlaas.cluster.errors import AccessDenied, CommandFailed
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.orchestrator_pod import output_of
from marlaas.cluster.views import ClusterJobView
from marlaas.local.folder import replace_folder, translated
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.status import AgentStatus


@dataclass(frozen=True, slots=True)
class Published:
    """An agent's adapter as the job's status lists it: the promoted version of a succeeded job, else the newest version.

    location: folder in the blob store. part: subfolder to write it to; empty if only this adapter is wanted.
    """

    agent: str
    version: int
    location: str
    part: str = ""


def published(job: ClusterJobView, agent: str | None) -> tuple[Published, ...]:
    """Return the adapter of the named agent, or those of all agents. Raises InvalidInput if there is none yet."""
    agents = {one.name: one for one in job.status.agents} if job.status is not None else {}
    if agent is not None and agent not in agents:
        raise InvalidInput(f"{job.key} has no agent {agent}; its agents are {', '.join(agents) or 'not known yet'}")
    names = tuple(agents) if agent is None else (agent,)
    found = tuple(one for name in names if (one := _published(agents[name], name if len(names) > 1 else "")))
    if found:
        return found
    own = ", ".join(one.name for one in agents.values() if one.adapter is not None)
    if agent is not None and own:
        # An agent that plays another one's policy has a version, and no adapter.
        plays = (
            "plays the policy of another agent" if agents[agent].policy_version is not None else "has no adapter yet"
        )
        raise InvalidInput(f"agent {agent} of {job.key} {plays}; agents with an adapter: {own}")
    raise InvalidInput(f"{job.key} has no published adapter yet; see kubectl marlaas why {job.name} -n {job.namespace}")


def _published(agent: AgentStatus, part: str) -> Published | None:
    version = agent.policy_version if agent.promoted_version is None else agent.promoted_version
    return None if version is None or agent.adapter is None else Published(agent.name, version, agent.adapter, part)


def fetch(kubectl: Kubectl, job: ClusterJobView, wanted: Sequence[Published], out: Path) -> tuple[Path, ...]:
    """Write each adapter as a PEFT folder, completely or not at all. Returns their folders: `out`, or subfolders of it.

    Nothing is written if one of the folders holds something else.

    Raises:
        AccessDenied: the user may not exec into the pod; the text names the adapter's place in the blob store.
        InvalidInput: a folder holds something else, or pods of several namespaces have the orchestrator's labels.
    """
    if any(one.part for one in wanted) and (out / CONFIG).exists():
        raise InvalidInput(f"{out} holds the adapter of one agent; choose a new folder, or an agent with --agent")
    for one in wanted:
        if (why := objection(out / one.part)) is not None:
            raise InvalidInput(f"{out / one.part} {why}")
    for one in wanted:
        _fetch(kubectl, job, one, out / one.part)
    return tuple(out / one.part for one in wanted)


def _fetch(kubectl: Kubectl, job: ClusterJobView, wanted: Published, target: Path) -> None:
    try:
        archive = _archive(kubectl, job, wanted)
    except AccessDenied as error:
        where = f"the adapter is in the blob store under {wanted.location}, from where the platform team can fetch it"
        raise AccessDenied(f"{error}. {where}") from error
    _unpack(archive, target.resolve())


def _archive(kubectl: Kubectl, job: ClusterJobView, wanted: Published) -> bytes:
    who = ("--namespace", job.namespace, "--job", job.name, "--agent", wanted.agent, "--version", str(wanted.version))
    return output_of(kubectl, "marlaas.cluster.published", ("--nats", "--blobs", "--creds"), who)


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
