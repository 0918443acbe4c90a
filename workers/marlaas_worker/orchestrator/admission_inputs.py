"""What a round of admissions takes from the caches of documents and progress. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from marlaas_api.messages import JobDocument, Progress
from marlaas_worker.orchestrator.admission import TenantTerms


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
