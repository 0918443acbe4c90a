"""The values on which a round of admissions depends, collected from the caches of documents, reports and progress."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from marlaas_api.bucket_cache import BucketCache
from marlaas_api.messages import JobDocument, Progress, ReplicaReport
from marlaas_worker.orchestrator.admission import AdmissionScene, TenantTerms
from marlaas_worker.orchestrator.capacity import capacities
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.running_jobs import RunningJobs
from marlaas_worker.orchestrator.tenants import TenantUse


def terms_of(documents: Iterable[tuple[int, JobDocument]]) -> dict[str, TenantTerms]:
    """Return weight and quota of each tenant.

    While the operator rewrites the documents of a tenant that was edited, they differ; the last written one counts.

    Args:
        documents: with their revisions.
    """
    newest: dict[str, tuple[int, JobDocument]] = {}
    for revision, document in documents:
        known = newest.get(document.tenant)
        if known is None or known[0] < revision:
            newest[document.tenant] = revision, document
    return {name: TenantTerms(one.tenant_weight, one.tenant_quota) for name, (_, one) in newest.items()}


def stored_bytes(documents: Iterable[JobDocument], progress: Mapping[str, Progress]) -> dict[str, int]:
    """Return the bytes that each tenant's jobs keep. progress: by uid."""
    total: Counter[str] = Counter()
    for document in documents:
        known = progress.get(document.uid)
        if known is not None and known.stored_bytes:
            total[document.tenant] += known.stored_bytes
    return dict(total)


class AdmissionInputs:
    """Collects an `AdmissionScene`. now: unix seconds."""

    def __init__(
        self,
        now: Callable[[], float],
        jobs: BucketCache[JobDocument],
        progress: ProgressStore,
        running: RunningJobs,
        tenants: TenantUse,
    ) -> None:
        self._now, self._jobs, self._progress = now, jobs, progress
        self._running, self._tenants = running, tenants

    def scene(
        self,
        documents: Mapping[str, JobDocument],
        holding: list[JobDocument],
        waits: Callable[[JobDocument], bool],
        reports: Iterable[ReplicaReport],
    ) -> AdmissionScene:
        """Return the values of this moment. Note the tenants' use, and let the jobs of tenants over a rate pause.

        Args:
            documents: all, by uid.
            holding: documents of admitted jobs, as they are published or were last readable.
            waits: whether a job that is not admitted waits for its admission.
        """
        now, places = self._now(), {document.uid for document in holding}
        known = {progress.uid: progress for progress in self._progress.all()}
        terms = terms_of((self._revision(key), document) for key, document, _ in self._jobs.items())
        self._tenants.note(terms, now)
        for owned in self._running:
            owned.stops.pauses = self._tenants.pacing.reason(owned.document.tenant)
        return AdmissionScene(
            waiting=[one for uid, one in documents.items() if uid not in places and waits(one)],
            holding=holding,
            since=[self._admitted_at(one.uid, known, now) for one in holding],
            pools=capacities(reports),
            tenants=terms,
            stored=stored_bytes(documents.values(), known),
            now=now,
            progress_of=self._progress.of,
        )

    def _admitted_at(self, uid: str, known: Mapping[str, Progress], now: float) -> float:
        """Return when a job was last admitted; now if it is not known."""
        owned, progress = self._running.get(uid), known.get(uid)
        if owned is not None:
            return owned.times.admitted_at
        return now if progress is None or progress.admitted_at is None else progress.admitted_at

    def _revision(self, key: str) -> int:
        entry = self._jobs.entry(key)
        return 0 if entry is None else entry.revision
