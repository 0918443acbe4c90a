"""The environment of a job: the code that plays its episodes, and its limits."""

import ipaddress
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from marlaas_api.kinds.base import ObjectName, Quantity, Spec, list_map, matching, rules
from marlaas_api.kinds.placement import Image, PullSecrets

RESERVED_ENDING = "-sandbox"
"""How the name of everything ends that the operator makes for a job in its namespace, the Secret with its bus credential included."""

_RESERVED = f"a Secret whose name ends in {RESERVED_ENDING} holds a job's own credential, which no environment may see"
_ONE_SOURCE = "give exactly one of name and image"
_ENTRYPOINT = "image needs entrypoint, the command that serves the environment"
_NO_IMAGE = "entrypoint is the command of an image; there is no image"
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
"""Where clouds answer a machine with its own metadata and credentials: the link-local ranges, and the addresses outside them. Never opened."""

_CLOSED = (
    "cidr lies in the link-local range, or is a cloud's own address, where machines keep their metadata and credentials: "
    "no environment may reach it"
)
_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_Port = Annotated[int, Field(ge=1, le=65535)]
_Argument = Annotated[str, StringConstraints(max_length=4096)]
EnvironmentName = Annotated[
    str,
    matching(
        rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|{_DOTTED}:{_DOTTED})$",
        "the name of a builtin environment, or module:attribute of your own",
        253,
    ),
]


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


class Egress(Spec):
    """One destination that the environment may reach; everything else is denied, and link-local and metadata addresses always are."""

    cidr: _Cidr = Field(
        description="Address range, for example 10.1.0.0/16. A range that holds the link-local one, or a metadata address, is opened without it.",
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
    """A Secret of the job's own namespace whose keys the environment sees as environment variables."""

    model_config = ConfigDict(json_schema_extra=rules((f"!self.name.endsWith('{RESERVED_ENDING}')", _RESERVED)))

    name: ObjectName = Field(description="Name of the Secret.")

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        if self.name.endswith(RESERVED_ENDING):
            raise ValueError(f"{_RESERVED}; found {self.name}")
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
        None, description="Builtin environment, or module:attribute of your own. Absent: image says what it is."
    )
    image: Image | None = Field(
        None, description="Container image with the environment; needs entrypoint. Absent: name says what it is."
    )
    image_pull_secrets: PullSecrets = Field(
        (), description="Secrets of the job's namespace with which its images are pulled; none by default."
    )
    entrypoint: Annotated[tuple[_Argument, ...], Field(max_length=64)] = Field(
        (), description="Command in the image that serves the environment. Absent: there is no image."
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment; their names and types are the environment's own. Absent: its defaults.",
        max_length=256,
    )
    replicas: int = Field(1, ge=1, le=1000, description="Number of sandboxes; one plays many episodes at once.")
    concurrency: int = Field(
        64, ge=1, le=4096, description="Episodes that one sandbox plays at once; the default fills an engine's batch."
    )
    episode_timeout_seconds: float = Field(
        300,
        gt=0,
        le=86400,
        description="Longest time for one episode, in seconds; then it is a fault of the environment. Time in which a turn waits or is generated is not counted.",
    )
    turn_timeout_seconds: float = Field(
        120,
        gt=0,
        le=86400,
        description="Longest time that the engine may take for one turn, in seconds; then it is a fault of the infrastructure. Waiting for "
        "a place in the engine, for an adapter's slot or for a replica that restarts is not counted.",
    )
    memory: Quantity = Field(
        "512Mi",
        description="Memory of one child process that runs environment code, in bytes; above it the child is killed.",
    )
    cpu: Quantity | None = Field(
        None, description="CPU request of one sandbox, in cores. Absent: the installation's own, a tenth of a core."
    )
    max_attempts: int = Field(3, ge=1, le=10, description="Plays of one episode before its fault stands.")
    max_fault_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of episodes lost to faults above which the job fails with the fault's own words; 1 never fails it.",
    )
    egress: Annotated[tuple[Egress, ...], Field(max_length=64)] = Field(
        (), description="Network destinations that the environment may reach; none by default."
    )
    secret_refs: Annotated[tuple[SecretRef, ...], Field(max_length=16)] = Field(
        (), description="Secrets that the environment sees; none by default.", json_schema_extra=list_map("name")
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
    def _secrets_differ(self) -> Self:
        names = [secret.name for secret in self.secret_refs]
        if len(set(names)) != len(names):
            raise ValueError("secretRefs must have different names")
        return self
