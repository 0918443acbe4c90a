"""Export of a job: the adapter's copy, trackers that receive metrics, and receivers of messages."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from marlaas_api.kinds.base import Distinct, ObjectName, PathText, Spec, list_map, matching
from marlaas_api.kinds.environment import Egress, SecretRef

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Names of the tracker libraries. Server, project and credentials come from each library's own environment variables."""

Trackers = Distinct[Tracker]


class SecretKeyRef(SecretRef):
    """One key of a Secret in the job's namespace."""

    key: Annotated[str, matching(r"^[-._a-zA-Z0-9]+$", "a key of a Secret: letters, digits, '-', '_' and '.'", 253)] = (
        Field(description="Key in the Secret.")
    )


class WebhookSpec(Spec):
    """A webhook. Its URL is a secret: whoever knows it can write there."""

    secret_ref: SecretKeyRef = Field(
        description="Where the URL is: `http://` or `https://`. The job's author must be allowed to get the Secret. `marlaas run` reads the environment "
        "variable MARLAAS_WEBHOOK_1 for the first entry of notify, MARLAAS_WEBHOOK_2 for the second, and so on."
    )


class NotifySpec(Spec):
    """One receiver of messages about the job, as JSON with the field `text`, which Slack, Mattermost and Discord's /slack accept."""

    webhook: WebhookSpec = Field(description="Where the messages are posted.")
    when: Distinct[Literal["end", "failure", "wait"]] = Field(
        ("end", "failure", "wait"),
        min_length=1,
        max_length=3,
        description="Occasions, each told once. end: the job has succeeded. failure: it has failed. wait: it has not been admitted, or has finished no step, for "
        "waitSeconds.",
    )
    wait_seconds: float = Field(
        1800,
        ge=10,
        le=30 * 86_400,
        description="Time without admission or a finished step after which `wait` is told, in seconds.",
    )


class HubExport(Spec):
    """A model repository of the Hugging Face hub."""

    repo: Annotated[
        str,
        matching(
            r"^[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*/[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*$",
            "a repository of the hub: OWNER/NAME, of letters, digits, and single - and . between them",
            96,
        ),
    ] = Field(
        description="Repository, OWNER/NAME; made if it does not exist. Of a job with several trained agents, each has a repository OWNER/NAME-AGENT."
    )
    private: bool = Field(True, description="Whether a repository that this job makes is private.")
    token_secret_ref: SecretKeyRef | None = Field(
        None,
        description="Where the token is that may write there; a cluster requires it. The job's author must be allowed to get the Secret. Absent: none. "
        "`marlaas run` ignores it, and takes the token HF_TOKEN or that of `hf auth login`.",
    )


_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9_.=@-]*"
"""Part of a path. It does not begin with a dot, so it is neither `.` nor `..`."""


class BucketExport(Spec):
    """Objects of a bucket of S3, or of a store that speaks its protocol."""

    url: Annotated[
        str,
        matching(
            rf"^s3://[A-Za-z0-9][A-Za-z0-9._-]*(/{_SEGMENT})+$",
            "s3://BUCKET/PREFIX, of letters, digits and _.=@-; no part begins with a dot",
            1024,
        ),
    ] = Field(
        description="Where the adapter's files are written, s3://BUCKET/PREFIX. Of a job with several trained agents, each has a PREFIX/AGENT."
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Secret whose keys are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, as far as the store needs them; a cluster "
        "requires it. The job's author must be allowed to get it. Absent: none. `marlaas run` ignores it, and reads these variables from the shell.",
    )


class VolumeExport(Spec):
    """A folder of a PersistentVolumeClaim."""

    claim_name: ObjectName = Field(
        description="Name of the PersistentVolumeClaim in the job's namespace. The pod that exports the job mounts it once the job has succeeded. The job's author must be allowed "
        "to update it. `marlaas run` has a folder of this name beside the manifest."
    )
    path: Annotated[
        str,
        matching(
            rf"^{_SEGMENT}(/{_SEGMENT})*$",
            "a folder below the volume, of letters, digits and _.=@-; no part begins with a dot",
            1024,
        ),
    ] = Field(
        description="Folder below the volume; made if it does not exist. Of a job with several trained agents, each has a subfolder AGENT."
    )


class ExportSpec(Spec):
    """Destinations of the promoted adapter besides the blob store, trackers that receive metrics, and receivers of messages."""

    path: PathText | None = Field(
        None,
        description="Folder on the machine of `marlaas run` to which the adapter is copied in PEFT format; ignored in a cluster. Absent: only the blob store "
        "has the adapter.",
    )
    hub: HubExport | None = Field(
        None,
        description="Repository of the Hugging Face hub to which the adapter is uploaded with its model card once the job has succeeded; in a cluster by a pod "
        "in the job's namespace. Absent: none.",
    )
    s3: BucketExport | None = Field(
        None, description="Bucket to which the same files are uploaded, in the same way. Absent: none."
    )
    volume: VolumeExport | None = Field(
        None, description="Volume to which the same files are written, in the same way. Absent: none."
    )
    trackers: Trackers = Field(
        (),
        max_length=4,
        description="Trackers that get the metrics of every step and evaluation: tensorboard, wandb, mlflow, trackio; none by default. In a cluster a pod in the job's "
        "namespace sends them; tensorboard works with `marlaas run` only, because it writes files.",
    )
    secret_refs: Annotated[tuple[SecretRef, ...], Field(max_length=8)] = Field(
        (),
        description="Secrets whose keys the libraries of trackers and hub receive as environment variables in a cluster, for example WANDB_API_KEY, "
        "MLFLOW_TRACKING_URI, TRACKIO_SERVER_URL and HF_ENDPOINT; none by default. The job's author must be allowed to get them.",
        json_schema_extra=list_map("name"),
    )
    egress: Annotated[tuple[Egress, ...], Field(max_length=16)] = Field(
        (),
        description="Network destinations of trackers, webhooks, hub and bucket, which the pod that sends to them may reach in a cluster; none by default.",
    )
    notify: Annotated[tuple[NotifySpec, ...], Field(max_length=8)] = Field(
        (), description="Receivers of messages about the job's end, its failure and long waits; none by default."
    )

    @model_validator(mode="after")
    def _secrets_differ(self) -> Self:
        names = [secret.name for secret in self.secret_refs]
        if len(set(names)) != len(names):
            raise ValueError("secretRefs must have different names")
        return self
