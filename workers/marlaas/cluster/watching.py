"""Live table of jobs in a cluster. It polls instead of holding a watch open, because a watch can stall unnoticed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marlaas.cluster.errors import ClusterSilent
from marlaas.cluster.headlines import headline, view
from marlaas.local.display import Display
from marlaas.local.table import JobView, ProgressMark, advanced, eta_s
from marlaas_api.kinds.problems import InvalidObject
from marlaas_api.messages import Phase

PERIOD_S = 2.0


@dataclass(slots=True)
class ClusterWatch:
    """Displays the jobs that `look` returns: the bodies of the watched RLJobs, without deleted ones."""

    look: Callable[[], Sequence[Mapping[str, Any]]]
    display: Display
    now: Callable[[], float]
    views: dict[str, JobView] = field(default_factory=dict)
    marks: dict[str, tuple[ProgressMark, ...]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

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
            self.display.waiting(f"{error}; trying again")
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
            self._tell_once(f"{_key(body)} is of another version of MARLaaS than this command: {error}")
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
            self._tell_once(f"{gone.name} is deleted")

    def _tell_once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            self.display.note(text)


def _is_final(one: JobView) -> bool:
    return one.progress is not None and one.progress.phase.final


def _key(body: Mapping[str, Any]) -> str:
    return f"{body['metadata'].get('namespace', '')}/{body['metadata'].get('name', '')}"
