"""The environment of a job: the code that plays its episodes, and its limits."""

import ipaddress
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from marlaas_api.kinds.base import ObjectName, Quantity, Spec, list_map, matching, rules
from marlaas_api.kinds.placement import Image, PullSecrets
from marlaas_api.kinds.sizes import args_problem

RESERVED_ENDING = "-sandbox"
"""Suffix of the names of all objects that the operator creates in a job's namespace, including the Secret with the bus credential."""

_RESERVED = f"a Secret whose name ends in {RESERVED_ENDING} holds a job's bus credential, which no environment may read"
_ONE_VOLUME = "a volume needs exactly one of configMap and pvc"
_ONE_SOURCE = "give exactly one of name and image"
_ENTRYPOINT = "image needs entrypoint, the command that serves the environment"
_NO_IMAGE = "entrypoint needs image: it is the command that runs in the image"
_NO_RANGE = "cidr must be an address range, for example 10.1.0.0/16"
CLOSED_RANGES = (
    ipaddress.ip_network("169.254.0.0/16"),
    ipaddress.ip_network("fe80::/10"),
    ipaddress.ip_network("fd00:ec2::254/128"),  # AWS
    ipaddress.ip_network("fd20:ce::254/128"),  # Google Cloud
    ipaddress.ip_network("168.63.129.16/32"),  # Azure
    ipaddress.ip_network("100.100.100.200/32"),  # Alibaba Cloud
    ipaddress.ip_network("192.0.0.192/32"),  # Oracle Cloud
)
"""Addresses of cloud metadata services, which return credentials: the link-local ranges and further addresses. Egress to them is never allowed."""

_CLOSED = (
    "cidr is in the link-local range or is the address of a cloud's metadata service, which returns credentials of the machine: "
    "no environment may reach it"
)
_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_Port = Annotated[int, Field(ge=1, le=65535)]
_Argument = Annotated[str, StringConstraints(max_length=4096)]
EnvironmentName = Annotated[
    str,
    matching(
        rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|{_DOTTED}:{_DOTTED})$",
        "the name of a builtin environment, or module:attribute for your own",
        253,
    ),
]


def _small(args: dict[str, Any]) -> dict[str, Any]:
    if problem := args_problem(args):
        raise ValueError(problem)
    return args


def _reachable(cidr: str) -> str:
    """Apply the schema's rules of `cidr`, for readers of manifests without an API server."""
    network = _network(cidr)
    for closed in CLOSED_RANGES:
        if (
            network.version == closed.version
            and network.network_address in closed
            and network.prefixlen >= closed.prefixlen
        ):
            raise ValueError(_CLOSED)
    return cidr


def _network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse an address range as Go does: no leading zeros, and no IPv4-mapped IPv6 address."""
    address, _, bits = cidr.partition("/")
    try:
        network = ipaddress.ip_network(f"{address}/{int(bits)}", strict=False)
    except ValueError:
        raise ValueError(_NO_RANGE) from None
    mapped = isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped is not None
    if mapped or bits != str(int(bits)):
        raise ValueError(_NO_RANGE)
    return network


_Cidr = Annotated[
    str,
    matching(r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$", "an address range, for example 10.1.0.0/16", 43),
    AfterValidator(_reachable),
]


class SuiteEnvironmentSpec(Spec):
    """Environment of a suite of the evaluation. It is played in the job's sandboxes, with their limits."""

    name: EnvironmentName = Field(
        description="Name of a builtin environment, or module:attribute of a module beside the job's own environment.",
    )
    args: Annotated[dict[str, Any], AfterValidator(_small)] = Field(
        default_factory=dict,
        max_length=256,
        description="Its arguments, at most 64 KiB as text; none by default. All rows of a data set without held_out are held-out tasks of the suite.",
    )


class Egress(Spec):
    """One network destination that the environment may reach. All others are denied; link-local and metadata addresses always are."""

    cidr: _Cidr = Field(
        description="Address range, for example 203.0.113.0/24. The part that the installation opens to jobs becomes reachable (network.jobEgress of the "
        "chart: by default, public addresses); a range without such a part is refused. Link-local and metadata addresses stay closed.",
        json_schema_extra=rules(
            ("isCIDR(self)", _NO_RANGE),
            (
                f"!isCIDR(self) || !{[str(closed) for closed in CLOSED_RANGES]}.exists(closed, "
                "cidr(closed).containsCIDR(cidr(self).masked()))",
                _CLOSED,
            ),
        ),
    )
    ports: Annotated[tuple[_Port, ...], Field(max_length=64)] = Field((), description="TCP ports; empty allows all.")


class SecretRef(Spec):
    """A Secret in the job's namespace."""

    model_config = ConfigDict(json_schema_extra=rules((f"!self.name.endsWith('{RESERVED_ENDING}')", _RESERVED)))

    name: ObjectName = Field(description="Name of the Secret.")

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        if self.name.endswith(RESERVED_ENDING):
            raise ValueError(f"{_RESERVED}; found {self.name}")
        return self


class ConfigMapRef(Spec):
    """A ConfigMap in the job's namespace."""

    name: ObjectName = Field(description="Name of the ConfigMap.")


class ClaimRef(Spec):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim; it is mounted read-only.")


class EnvironmentVolume(Spec):
    """Files that the environment reads: below a folder of the volume's name. On a machine, the folder is beside the manifest."""

    model_config = ConfigDict(json_schema_extra=rules(("has(self.configMap) != has(self.pvc)", _ONE_VOLUME)))

    name: Annotated[str, matching(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "lower-case letters, digits and -", 40)] = Field(
        description="Name of the folder."
    )
    config_map: ConfigMapRef | None = Field(None, description="A ConfigMap; each key is a file. Absent: pvc.")
    pvc: ClaimRef | None = Field(None, description="A PersistentVolumeClaim, for larger files. Absent: configMap.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config_map is None) == (self.pvc is None):
            raise ValueError(_ONE_VOLUME)
        return self


class EnvironmentSpec(Spec):
    """The code that plays episodes: a builtin or `module:attribute` by name, or an image with an entrypoint."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.name) != has(self.image)", _ONE_SOURCE),
            ("!has(self.image) || (has(self.entrypoint) && size(self.entrypoint) > 0)", _ENTRYPOINT),
            ("has(self.image) || !has(self.entrypoint) || size(self.entrypoint) == 0", _NO_IMAGE),
        )
    )
    name: EnvironmentName | None = Field(
        None,
        description="Builtin environment, or module:attribute for your own. Absent: image contains the environment.",
    )
    image: Image | None = Field(
        None, description="Container image with the environment; needs entrypoint. Absent: name selects it."
    )
    image_pull_secrets: PullSecrets = Field(
        (),
        description="Registry credentials for image: Secrets in the job's namespace; none by default. The job's author must be allowed to get them.",
    )
    entrypoint: Annotated[tuple[_Argument, ...], Field(max_length=64)] = Field(
        (), description="Command in the image that serves the environment; needed with image. Absent: name is used."
    )
    args: Annotated[dict[str, Any], AfterValidator(_small)] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment, which defines their names and types; at most 64 KiB as text. Absent: the environment's defaults.",
        max_length=256,
    )
    replicas: int = Field(1, ge=1, le=1000, description="Number of sandbox pods; each plays many episodes at once.")
    concurrency: int = Field(
        64,
        ge=1,
        le=4096,
        description="Number of episodes that one sandbox plays at once.",
    )
    episode_timeout_seconds: float = Field(
        300,
        gt=0,
        le=86400,
        description="Timeout of one episode, in seconds; then the episode ends as an environment fault. Time in which turns wait or are generated is not "
        "counted.",
    )
    turn_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Longest generation of one turn, in seconds; then the reply ends there, as one that rollout.maxTokens cuts, and trains. Waiting in the "
        "engine's queue, for an adapter slot or for a replica that restarts is not counted. Absent: 120, or half a second for each token of "
        "rollout.maxTokens if that is more.",
    )
    memory: Quantity = Field(
        "512Mi",
        description="Memory limit of one child process that runs environment code, in bytes; above it, the child is killed.",
    )
    cpu: Quantity | None = Field(
        None, description="CPU request of one sandbox, in cores. Absent: the installation's default, 0.1 cores."
    )
    max_attempts: int = Field(
        3, ge=1, le=10, description="Number of times that an episode is played before its fault is recorded."
    )
    max_fault_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Fraction of recent episodes lost to faults above which the job fails, with the last fault as its message; 1 never fails it.",
    )
    egress: Annotated[tuple[Egress, ...], Field(max_length=64)] = Field(
        (), description="Network destinations that the environment may reach; none by default."
    )
    secret_refs: Annotated[tuple[SecretRef, ...], Field(max_length=16)] = Field(
        (),
        description="Secrets whose keys the environment receives as environment variables; none by default. The job's author must be allowed to get them.",
        json_schema_extra=list_map("name"),
    )

    volumes: Annotated[tuple[EnvironmentVolume, ...], Field(max_length=8)] = Field(
        (),
        description="ConfigMaps and claims of the job's namespace, mounted read-only, in which the environment looks up relative names of files; none by "
        "default. The job's author must be allowed to get them. `marlaas run` has folders of these names beside the manifest.",
        json_schema_extra=list_map("name"),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.image is None):
            raise ValueError(f"{_ONE_SOURCE}; found {'both' if self.name else 'neither'}")
        if self.image is not None and not self.entrypoint:
            raise ValueError(_ENTRYPOINT)
        if self.image is None and self.entrypoint:
            raise ValueError(_NO_IMAGE)
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [secret.name for secret in self.secret_refs]
        if len(set(names)) != len(names):
            raise ValueError("secretRefs must have different names")
        volumes = [volume.name for volume in self.volumes]
        if len(set(volumes)) != len(volumes):
            raise ValueError("volumes must have different names")
        return self
