"""Live table of jobs in a cluster: RLJob objects as rows of the table of `marlaas run`, read again every two seconds.

It polls instead of holding a watch open, because a watch can stall unnoticed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marlaas.cluster.errors import ClusterSilent
from marlaas.cluster.views import condition, seconds
from marlaas.local.display import Display
from marlaas.local.eta import ProgressMark, advanced, eta_s
from marlaas.local.table import JobView
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import AgentProgress, JobDocument, Phase, Progress
from marlaas_api.names import DEFAULT_TENANT
from marlaas_api.usage_objects import usage_amounts


def view(body: Mapping[str, Any], now: float) -> JobView:
    """Return the row; `now` is the time of its progress, in unix seconds. Raises InvalidObject for an object of a newer MARLaaS."""
    job = parse(RLJob, body)
    document = JobDocument(
        namespace=job.metadata.namespace,
        job=job.metadata.name,
        uid=job.metadata.uid or "",
        generation=job.metadata.generation,
        pool=job.spec.pool_ref.name,
        tenant=(job.status.tenant if job.status is not None else None) or DEFAULT_TENANT,
        spec=job_spec(job.spec),
    )
    # an RLJob does not tell its tenant's weight, and not everybody may read Tenants
    return JobView(document, _progress(document, job.status, now), is_weight_known=False)


def headline(views: Sequence[JobView]) -> str:
    """Return the line above the table: the number of jobs per phase, and the reason of the first job that waits or has a fault."""
    phases = [progress.phase.value if (progress := one.progress) else "Starting" for one in views]
    counts = ", ".join(f"{phases.count(phase)} {phase.lower()}" for phase in dict.fromkeys(phases))
    stuck = next((one for one in views if _is_stuck(one)), None)
    if stuck is None or stuck.progress is None:
        return counts
    return f"{counts} · {stuck.name}: {stuck.progress.reason}: {stuck.progress.message.splitlines()[-1]}"


def _is_stuck(one: JobView) -> bool:
    progress = one.progress
    waits = progress is not None and progress.phase in (Phase.QUEUED, Phase.SUSPENDED)
    faulty = (
        progress is not None and progress.phase is Phase.RUNNING and progress.reason not in ("Admitted", "Training")
    )
    return progress is not None and bool(progress.message) and (waits or faulty)


def _progress(document: JobDocument, status: RLJobStatus | None, now: float) -> Progress | None:
    if status is None or status.phase is None:
        return None
    admitted = condition(status, "Admitted")
    return Progress(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        generation=status.observed_generation or document.generation,
        phase=Phase(status.phase),
        admitted=admitted is not None and admitted.status == "True",
        reason=status.reason or "",
        message=status.message or "",
        step=status.step or 0,
        steps=status.steps or document.spec.training.steps,
        versions={agent.name: agent.policy_version for agent in status.agents if agent.policy_version is not None},
        reward=status.reward,
        eval_before=status.eval_before,
        eval_last=status.eval_last,
        staleness=status.staleness or 0.0,
        tokens=status.tokens or 0,
        tokens_per_s=status.tokens_per_second or 0.0,
        accelerator_s=status.accelerator_seconds or 0.0,
        faults=dict(status.faults or {}),
        training_faults=dict(status.training_faults or {}),
        usage={agent.name: usage_amounts(agent.usage) for agent in status.agents},
        agents={
            agent.name: AgentProgress(
                reward=agent.reward,
                eval_before=agent.eval_before,
                eval_last=agent.eval_last,
                staleness=agent.staleness or 0.0,
                untrained=dict(agent.untrained_steps or {}),
            )
            for agent in status.agents
        },
        started_at=seconds(status.started_at),
        finished_at=seconds(status.finished_at),
        at=now,
    )


PERIOD_S = 2.0


@dataclass(slots=True)
class ClusterWatch:
    """Displays the jobs that `look` returns: the bodies of the watched RLJobs, without deleted ones."""

    look: Callable[[], Sequence[Mapping[str, Any]]]
    display: Display
    now: Callable[[], float]
    views: dict[str, JobView] = field(default_factory=dict)
    marks: dict[str, tuple[ProgressMark, ...]] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)

    def run(self, pause: Callable[[], None]) -> None:
        """Poll and display until every job is final or deleted."""
        while self.round():
            pause()

    def round(self) -> bool:
        """Poll once; return False when every job is final or deleted.

        If the API server does not answer, display that and return True, so that the next round asks again.
        """
        try:
            bodies = self.look()
        except ClusterSilent as error:
            self.display.waiting(f"{error}; retrying")
            return True
        seen = [one for body in bodies if (one := self._view(body)) is not None]
        self._forget_all_but(seen)
        ordered = sorted(seen, key=lambda one: (_is_final(one), one.name))
        self.display.waiting(headline(ordered))
        self.display.jobs(ordered)
        return not all(_is_final(one) for one in seen)

    @property
    def failed(self) -> bool:
        """Whether any of the jobs that still exist has failed."""
        return any(one.progress is not None and one.progress.phase is Phase.FAILED for one in self.views.values())

    def _view(self, body: Mapping[str, Any]) -> JobView | None:
        try:
            fresh = view(body, self.now())
        except InvalidObject as error:
            self._note_once(f"{_key(body)} cannot be shown, because another version of MARLaaS wrote it: {error}")
            return None
        return self._timed(fresh)

    def _timed(self, fresh: JobView) -> JobView:
        """Return the view with the time when its progress last changed, and with the estimated time left."""
        progress, uid = fresh.progress, fresh.document.uid
        if progress is None:
            self.views[uid] = fresh
            return fresh
        before = self.views[uid].progress if uid in self.views else None
        if before is not None and before.model_copy(update={"at": progress.at}) == progress:
            progress = before
        if progress.phase is Phase.RUNNING:
            self.marks[uid] = advanced(self.marks.get(uid, ()), progress.step, self.now())
        timed = replace(fresh, progress=progress, eta_s=eta_s(self.marks.get(uid, ()), progress.steps, self.now()))
        self.views[uid] = timed
        return timed

    def _forget_all_but(self, seen: Sequence[JobView]) -> None:
        uids = {one.document.uid for one in seen}
        for uid in [uid for uid in self.views if uid not in uids]:
            gone = self.views.pop(uid)
            self._note_once(f"{gone.name} was deleted")

    def _note_once(self, text: str) -> None:
        if text not in self.noted:
            self.noted.add(text)
            self.display.note(text)


def _is_final(one: JobView) -> bool:
    return one.progress is not None and one.progress.phase.final


def _key(body: Mapping[str, Any]) -> str:
    return f"{body['metadata'].get('namespace', '')}/{body['metadata'].get('name', '')}"
