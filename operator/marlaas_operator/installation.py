"""What the chart tells the operator about the installation: one YAML file, read at start (a change restarts the operator)."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from marlaas_api.errors import InvalidInput


class Settings(BaseModel):
    """A part of the file: camelCase keys, unknown keys refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True, extra="forbid"
    )


class BlobSettings(Settings):
    """Where adapters and checkpoints lie. claim_name: volume that is mounted at the URL's path (file://). secret_name: Secret of the
    release's namespace whose keys are environment variables of the object store's client (S3, GCS, Azure)."""

    url: str
    claim_name: str | None = None
    secret_name: str | None = None


class ImageSettings(Settings):
    """The image of the workers, unless a pool says otherwise."""

    name: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


class PythonEnvironment(Settings):
    """A volume with the workers' Python packages, for an image that has only Python. It is mounted read-only; sandboxes of other
    namespaces need a claim of the same name in theirs."""

    claim_name: str
    python_path: str
    mount_path: str


class ModelCache(Settings):
    """Where prepared models are kept. claim_name None: each pod prepares its own, in an emptyDir."""

    claim_name: str | None = None


class SandboxSettings(Settings):
    """What holds for every sandbox unless its pool says otherwise. default_cpu: CPU request, in cores."""

    runtime_class_name: str | None = None
    default_cpu: str = "100m"


class Installation(Settings):
    """One release of the chart.

    nats_pod_selector: labels of the bus's pods in the release's namespace; None for an external bus, which `nats_cidrs` then tells the
    network policies. dns_cidrs: name servers that are no pods of kube-system. metrics_from: NetworkPolicy peers that may read the figures of pools' workers. bus_secret: Secret with the bus's keys and the platform's credentials.
    """

    release: str
    namespace: str
    nats_url: str
    nats_pod_selector: dict[str, str] | None = None
    nats_cidrs: tuple[str, ...] = ()
    bus_secret: str
    blobs: BlobSettings
    worker_image: ImageSettings
    python_environment: PythonEnvironment | None = None
    model_cache: ModelCache = Field(default_factory=ModelCache)
    dns_cidrs: tuple[str, ...] = ()
    metrics_from: tuple[dict[str, Any], ...] = ()
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def load(path: Path) -> Installation:
    """Read the file.

    Raises:
        InvalidInput: it cannot be read, or says what this operator does not understand.
    """
    try:
        return Installation.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InvalidInput(f"installation file {path}: {error}") from error
