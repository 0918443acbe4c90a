"""Plan for documents whose RLJob no longer exists, because its finalizer was removed after a timeout or by hand."""

from marlaas_api.messages import JobDocument
from marlaas_operator.plan import Plan
from marlaas_operator.policies.document_publishing import forget


def plan_orphan(document: JobDocument) -> Plan:
    """Return the plan for a document without an RLJob of its uid."""
    write = forget(document)
    return Plan(actions=(write,) if write is not None else ())
