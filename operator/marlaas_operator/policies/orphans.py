"""Documents whose RLJob is gone: what a finalizer that could not wait has left behind."""

from marlaas_api.messages import JobDocument
from marlaas_operator.plan import Plan
from marlaas_operator.policies.document_publishing import forget


def plan_orphan(document: JobDocument) -> Plan:
    """What to do about a document of which no RLJob of its uid exists."""
    write = forget(document)
    return Plan(actions=(write,) if write is not None else ())
