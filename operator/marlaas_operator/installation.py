"""Settings of one release of the chart: a YAML file that is read at start. A change of it restarts the operator."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from marlaas_api.errors import InvalidInput
from marlaas_operator.address_ranges import PUBLIC, opened


class Settings(BaseModel):
    """Base of all parts of the file: keys are camelCase, unknown keys are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True, extra="forbid"
    )


class BlobSettings(Settings):
    """Storage of adapters and checkpoints.

    Attributes:
        claim_name: volume that is mounted at the path of the URL (`file://` only).
        secret_name: Secret in the release's namespace. Its keys become environment variables of the object
            store's client (S3, GCS, Azure).
    """

    url: str
    claim_name: str | None = None
    secret_name: str | None = None


class ImageSettings(Settings):
    """Image of the workers; a pool may set its own."""

    name: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


class PythonEnvironment(Settings):
    """Volume with the workers' Python packages, for an image that contains only Python.

    The volume is mounted read-only. Each namespace with sandboxes needs its own claim of this name.
    """

    claim_name: str
    python_path: str
    mount_path: str


class ModelCache(Settings):
    """Storage of prepared models. claim_name None: each pod prepares its own copy in an emptyDir."""

    claim_name: str | None = None


class SandboxSettings(Settings):
    """Defaults of every sandbox; a pool may set its own. default_cpu: CPU request, in cores."""

    runtime_class_name: str | None = None
    default_cpu: str = "100m"


def _openable(text: str) -> str:
    if text != PUBLIC and not list(opened((text,), ())):
        raise ValueError(f"{text} is link-local or a cloud's metadata service, which stays closed; remove it")
    return text


Range = Annotated[str, AfterValidator(_openable)]
"""A CIDR, or `public`: all addresses outside `closed_ranges`."""


class Destinations(Settings):
    """Addresses and TCP ports of a service outside the cluster."""

    ranges: tuple[Range, ...] = (PUBLIC,)
    ports: tuple[int, ...] = (443,)


class NetworkSettings(Settings):
    """Addresses that pods may reach besides DNS and the bus.

    Attributes:
        closed_ranges: addresses that `public` does not contain: private ones and the cluster's own.
        job_egress: ranges that jobs may open with `environment.egress`.
        store, hub: object store and model hub, for engines and trainers.
    """

    closed_ranges: tuple[str, ...]
    job_egress: tuple[Range, ...] = (PUBLIC,)
    store: Destinations = Field(default_factory=Destinations)
    hub: Destinations = Field(default_factory=Destinations)


class Installation(Settings):
    """One release of the chart.

    Attributes:
        nats_pod_selector: labels of the bus's pods in the release's namespace; None for an external bus.
        nats_cidrs: address ranges of an external bus, for the network policies.
        bus_secret: Secret with the bus's keys and the platform's credentials.
        dns_cidrs: name servers that do not run as pods in kube-system.
        require_tenant: jobs of namespaces without a Tenant are not handed over.
        metrics_from: NetworkPolicy peers that may scrape the metrics of pools' workers.
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
    network: NetworkSettings
    metrics_from: tuple[dict[str, Any], ...] = ()
    require_tenant: bool = False
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def load(path: Path) -> Installation:
    """Read and validate the installation file.

    Raises:
        InvalidInput: the file cannot be read, or has unknown or invalid settings.
    """
    try:
        return Installation.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InvalidInput(f"installation file {path}: {error}") from error
