"""Placement and start of pods: the parts of a PodSpec that a manifest may give, under Kubernetes' names."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from marlaas_api.kinds.base import ObjectName, Spec, list_map, matching, rules

_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_KEY_OR_EXISTS = "a toleration without a key must have operator: Exists, which tolerates every taint"
_EXISTS_HAS_NO_VALUE = "operator: Exists takes no value; remove it, or choose operator: Equal"
_SECONDS_NEED_NO_EXECUTE = "tolerationSeconds needs effect: NoExecute, the only effect that ends running pods"
_LONG_KEY = "a label's name has at most 317 characters"

LabelKey = Annotated[str, matching(_LABEL_KEY, "the name of a label or taint, for example cloud.example/gpu", 317)]
LabelValue = Annotated[
    str, matching(_LABEL_VALUE, "letters, digits, '-', '_' and '.', beginning and ending with a letter or digit", 63)
]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Affinity = Annotated[dict[str, Any], Field(max_length=3)]
"""A PodSpec's `affinity`. The API server validates its content only when pods are created."""

LabelMap = Annotated[
    dict[Annotated[str, StringConstraints(max_length=317)], LabelValue],
    Field(max_length=64, json_schema_extra=rules(("self.all(key, size(key) <= 317)", _LONG_KEY))),
]


class PullSecret(Spec):
    """A Secret of type kubernetes.io/dockerconfigjson, in the namespace of the pods that need it."""

    name: ObjectName = Field(description="Name of the Secret.")


class SecretKeyRef(Spec):
    """One key of a Secret in the namespace of the Helm release."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: Annotated[str, matching(r"^[-._a-zA-Z0-9]+$", "a key of a Secret: letters, digits, '-', '_' and '.'", 253)] = (
        Field("token", description="Key within the Secret; token by default.")
    )


class Toleration(Spec):
    """A toleration of a node taint, as in a PodSpec."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.key) || self.operator == 'Exists'", _KEY_OR_EXISTS),
            ("!has(self.value) || self.operator != 'Exists'", _EXISTS_HAS_NO_VALUE),
            (
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                _SECONDS_NEED_NO_EXECUTE,
            ),
        )
    )
    key: LabelKey | None = Field(None, description="Name of the taint. Absent: all taints; needs operator Exists.")
    operator: Literal["Equal", "Exists"] = Field(
        "Equal",
        description="Comparison of the taint's value. Equal (Kubernetes' default): it must equal `value`. Exists: any value matches.",
    )
    value: LabelValue | None = Field(
        None, description="Value of the taint, for operator Equal. Absent: the empty value."
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint. Absent: all three effects."
    )
    toleration_seconds: int | None = Field(
        None,
        ge=0,
        le=315_360_000,
        description="Time for which a running pod stays on the node after the taint is added, in seconds; only with effect NoExecute. Absent: unlimited.",
    )

    @model_validator(mode="after")
    def _one_of_kubernetes(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError(_KEY_OR_EXISTS)
        if self.value is not None and self.operator == "Exists":
            raise ValueError(_EXISTS_HAS_NO_VALUE)
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(_SECONDS_NEED_NO_EXECUTE)
        return self


def _names_differ(secrets: tuple[PullSecret, ...]) -> tuple[PullSecret, ...]:
    names = [secret.name for secret in secrets]
    again = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if again is not None:
        raise ValueError(f"'{again}' is listed twice")
    return secrets


Tolerations = Annotated[tuple[Toleration, ...], Field(max_length=64)]
PullSecrets = Annotated[
    tuple[PullSecret, ...], Field(max_length=16, json_schema_extra=list_map("name")), AfterValidator(_names_differ)
]
