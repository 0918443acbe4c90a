"""Comparison of a desired object with the observed one. Only fields that we set are compared. Pure.

Others may add labels, annotations, containers, environment variables and fields. Lists that Kubernetes merges
by key are compared by that key, all others as a whole. Quantities are compared by value.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from marlaas_api.kinds.base import quantity
from marlaas_operator.manifests.names import DESIRED_HASH

_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
_QUANTITIES = frozenset({"requests", "limits"})
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def differs(desired: Mapping[str, Any], observed: Mapping[str, Any] | None) -> bool:
    """Return whether the object must be applied.

    That is so if it is absent, has another desired hash, or a field that we set was changed.
    """
    if observed is None:
        return True
    return _annotation(desired) != _annotation(observed) or not _holds(desired, observed, "")


def _annotation(manifest: Mapping[str, Any]) -> Any:
    return (manifest["metadata"].get("annotations") or {}).get(DESIRED_HASH)


def _holds(desired: Any, observed: Any, key: str) -> bool:
    """Return whether the observed value contains everything desired."""
    if isinstance(desired, Mapping):
        return _mapping_holds(desired, observed, key)
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _list_holds(desired, observed, key)
    if observed is None:
        return not desired  # the server omits false, zero and empty values
    return bool(desired == observed) or (key in ("sizeLimit", "quantity") and _same_quantity(desired, observed))


def _mapping_holds(desired: Mapping[str, Any], observed: Any, key: str) -> bool:
    if observed is None:
        return not desired
    inside = "quantity" if key in _QUANTITIES else ""
    return isinstance(observed, Mapping) and all(
        _holds(value, observed.get(name), inside or name) for name, value in desired.items()
    )


def _list_holds(desired: Sequence[Any], observed: Any, key: str) -> bool:
    if observed is None:
        return not desired
    if key in _KEYS:
        named = {item.get(_KEYS[key]): item for item in observed}
        return all(_holds(item, named.get(item[_KEYS[key]]), "") for item in desired)
    return len(desired) == len(observed) and all(
        _holds(mine, theirs, "") for mine, theirs in zip(desired, observed, strict=True)
    )


def _same_quantity(desired: object, observed: object) -> bool:
    texts = str(desired), str(observed)
    return all(_QUANTITY.fullmatch(text) for text in texts) and quantity(texts[0]) == quantity(texts[1])
