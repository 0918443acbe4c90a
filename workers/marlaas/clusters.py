"""Jobs of a Kubernetes cluster from Python: submit them, wait for them, and read their status, records and adapters.

Everything goes through kubectl, as with the commands: its kubeconfig, its login, its permissions.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marlaas.cluster.errors import ClusterSilent
from marlaas.cluster.fetching import fetch, published
from marlaas.cluster.kubectl import ClusterTarget, Kubectl
from marlaas.cluster.orchestrator_pod import output_of
from marlaas.cluster.records import MODULE, Record, parsed
from marlaas.cluster.submission import submit
from marlaas.cluster.views import RLJOBS, ClusterJobView, job_view
from marlaas.manifest import load
from marlaas.runs import rows_of, to_yaml
from marlaas_api.errors import MarlaasError
from marlaas_api.kinds import Kind
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import EvalRecord, StepRecord

POLL_S = 5.0
_FINAL = ("Succeeded", "Failed")


class JobFailed(MarlaasError):
    """A job of a cluster has ended otherwise than succeeded. status: its last one."""

    def __init__(self, name: str, status: RLJobStatus) -> None:
        super().__init__(f"{name} has failed: {status.reason}: {status.message}")
        self.status = status


class Cluster:
    """A cluster of the kubeconfig, and a namespace of it.

    Args:
        context: of the kubeconfig. namespace: of jobs that name none. kubeconfig: file. None: kubectl's own choice.

    Methods raise the errors of `marlaas.cluster.errors`: no kubectl, no answer, no access, no such object.
    """

    def __init__(
        self, context: str | None = None, namespace: str | None = None, kubeconfig: str | Path | None = None
    ) -> None:
        self._kubectl = Kubectl(ClusterTarget(context, namespace, None if kubeconfig is None else str(kubeconfig)))

    def submit(self, *manifests: str | Path | Kind) -> "tuple[ClusterJob, ...]":
        """Check manifests, here and on the API server, apply all of them or none, and return their jobs.

        Args:
            manifests: files, or objects such as `RLJob`.

        Raises InvalidManifest with file, line and field.
        """
        files = [str(one) for one in manifests if not isinstance(one, Kind)]
        with tempfile.TemporaryDirectory() as folder:
            if objects := [one for one in manifests if isinstance(one, Kind)]:
                written = Path(folder) / "manifests.yaml"
                written.write_text(to_yaml(*objects), encoding="utf-8")
                files.append(str(written))
            placed = load(files, runnable=False).placed
        applied = submit(self._kubectl, placed)
        return tuple(ClusterJob(self._within(one.namespace), one.name) for one in applied if one.kind == "RLJob")

    def job(self, name: str) -> "ClusterJob":
        """Return a job by its name, as `name` or `namespace/name`. It need not exist yet."""
        namespace, _, own = name.rpartition("/")
        return ClusterJob(self._within(namespace) if namespace else self._kubectl, own)

    def jobs(self) -> "tuple[ClusterJob, ...]":
        """Return the jobs of the namespace."""
        found = (body["metadata"] for body in self._kubectl.list(RLJOBS))
        return tuple(ClusterJob(self._within(meta["namespace"]), meta["name"]) for meta in found)

    def _within(self, namespace: str) -> Kubectl:
        return replace(self._kubectl, target=replace(self._kubectl.target, namespace=namespace))


class ClusterJob:
    """One RLJob of a cluster. `await job` waits for its end, as `wait` does."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl, self.name = kubectl, name

    def status(self) -> RLJobStatus:
        """Return the job's status; without a phase before the operator has seen it. Raises ObjectMissing."""
        return self._view().status or RLJobStatus()

    def wait(self, timeout_s: float | None = None) -> RLJobStatus:
        """Wait until the job has succeeded, and return its status. An API server that does not answer is asked again.

        Raises:
            JobFailed: it has failed.
            TimeoutError: it goes on after `timeout_s` seconds.
        """
        begun, status, silence = time.monotonic(), RLJobStatus(), ""
        while True:
            try:
                status, silence = self.status(), ""
            except ClusterSilent as error:  # asked again, as by `marlaas watch`
                silence = f"; {error}"
            if status.phase in _FINAL:
                break
            if timeout_s is not None and time.monotonic() - begun > timeout_s:
                said = f"{status.phase}: {status.reason}{silence}"
                raise TimeoutError(f"{self.name} goes on after {timeout_s:g} s: {said}")
            time.sleep(POLL_S if timeout_s is None else min(POLL_S, timeout_s))
        if status.phase == "Failed":
            raise JobFailed(self.name, status)
        return status

    def __await__(self) -> Generator[Any, None, RLJobStatus]:
        return asyncio.to_thread(self.wait).__await__()

    def steps(self) -> Iterator[StepRecord]:
        """Yield the finished steps in order, and wait for further ones while the job goes on.

        Needs the right to exec into the orchestrator's pod, as `kubectl marlaas adapter` does. Raises AccessDenied without it.
        """
        return (record for record in self._records() if isinstance(record, StepRecord))

    def evaluations(self) -> Iterator[EvalRecord]:
        """Yield the evaluations in order, as `steps`."""
        return (record for record in self._records() if isinstance(record, EvalRecord))

    def rows(self) -> list[dict[str, Any]]:
        """Return the finished steps as flat mappings, for example for `pandas.DataFrame(job.rows())`."""
        return rows_of([record for record in self._read(()) if isinstance(record, StepRecord)])

    def adapter(self, out: str | Path, agent: str | None = None) -> Path:
        """Fetch the published adapter as a PEFT folder, and return the folder; of several agents, a folder with one for each.

        Raises InvalidInput (there is none yet, or the folder holds something else), AccessDenied.
        """
        view = self._view()
        fetch(self._kubectl, view, published(view, agent), Path(out))
        return Path(out)

    def suspend(self) -> None:
        """Stop the job and free its place; `resume` continues it."""
        self._kubectl.patch(RLJOBS, self.name, {"spec": {"suspend": True}})

    def resume(self) -> None:
        """Continue a suspended job."""
        self._kubectl.patch(RLJOBS, self.name, {"spec": {"suspend": False}})

    def _view(self) -> ClusterJobView:
        return job_view(self._kubectl.get(RLJOBS, self.name))

    def _records(self) -> Iterator[Record]:
        seen: list[Record] = []
        while True:
            with contextlib.suppress(ClusterSilent):  # asked again
                is_last = self.status().phase in _FINAL
                fresh = self._read(seen)
                seen += fresh
                yield from fresh
                if is_last:
                    return
            time.sleep(POLL_S)

    def _read(self, seen: Sequence[Record]) -> list[Record]:
        """Return the records beside those that were read before."""
        view = self._view()
        steps = max((one.step for one in seen if isinstance(one, StepRecord)), default=-1)
        versions = max((one.version for one in seen if isinstance(one, EvalRecord)), default=-1)
        place = ("--namespace", view.namespace, "--job", view.name, "--uid", view.uid)
        after = ("--step", str(steps), "--version", str(versions))
        return list(parsed(output_of(self._kubectl, MODULE, ("--nats", "--creds"), (*place, *after))))
