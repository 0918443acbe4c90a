"""What every message has in common."""

from pydantic import BaseModel, ConfigDict

from marlaas_api.names import JobRef


class BusMessage(BaseModel):
    """Base of everything on the bus; the class name is its tag on the wire (see `marlaas_api.wire`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JobMessage(BusMessage):
    """A message of one job. The uid tells a job from an earlier one of the same name: readers ignore other uids."""

    namespace: str
    job: str
    uid: str

    @property
    def ref(self) -> JobRef:
        """The job this belongs to."""
        return JobRef(self.namespace, self.job, self.uid)
