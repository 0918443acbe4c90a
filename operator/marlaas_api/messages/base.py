"""Base classes of the messages."""

from pydantic import BaseModel, ConfigDict

from marlaas_api.names import JobRef


class BusMessage(BaseModel):
    """Base of every message on the bus; the class name is its type tag (see `marlaas_api.wire`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JobMessage(BusMessage):
    """A message of one job. The uid separates the job from an earlier one of the same name: readers ignore other uids."""

    namespace: str
    job: str
    uid: str

    @property
    def ref(self) -> JobRef:
        """The job of the message."""
        return JobRef(self.namespace, self.job, self.uid)
