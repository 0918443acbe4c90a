"""Server-side apply for the fake: field ownership of one manager, and JSON merge patches (RFC 7386). Pure.

An object is split into leaves by path. Items of lists that Kubernetes merges by key are addressed by that key.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that turns `before` into `after`; empty when they are equal. Lists are replaced whole."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := merge_patch(old, value):
                patch[key] = inner
        elif key not in before or old != value:
            patch[key] = value
    return patch


def merged(before: Any, patch: Any) -> Any:
    """Return a value after a JSON merge patch (RFC 7396), in which None removes a field."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(before) if isinstance(before, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


Step = str | tuple[str, str]
Leaves = dict[tuple[Step, ...], Any]

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
    "conditions": "type",
    "ownerReferences": "uid",
}


def leaves(value: Any) -> Leaves:
    """Return the leaves of a body by path; an empty map or list is a leaf."""
    return dict(_walk(value, (), ""))


def rebuilt(parts: Leaves) -> dict[str, Any]:
    """Build the body that has these leaves, the inverse of `leaves`."""
    root: dict[Step, Any] = {}
    for path, leaf in parts.items():
        place = root
        for step in path[:-1]:
            inner = place.setdefault(step, {})
            place = inner if isinstance(inner, dict) else place.setdefault(step, {})
        if not (leaf in ({}, []) and place.get(path[-1])):
            place[path[-1]] = leaf
    closed = _closed(root)
    assert isinstance(closed, dict)
    return closed


def applied(body: dict[str, Any], owned: set[tuple[Step, ...]], desired: dict[str, Any]) -> dict[str, Any]:
    """Return the body after an apply of `desired` by the manager that owned the leaves `owned`."""
    wanted = leaves(desired)
    kept = {path: leaf for path, leaf in leaves(body).items() if path in wanted or path not in owned}
    return rebuilt({**kept, **wanted})


def _walk(value: Any, path: tuple[Step, ...], name: str) -> Iterator[tuple[tuple[Step, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _walk(inner, (*path, key), key)
    elif isinstance(value, list) and value and _keyed(value, name):
        for item in value:
            yield from _walk(item, (*path, (_KEYS[name], str(item[_KEYS[name]]))), "")
    else:
        yield path, value


def _keyed(items: list[Any], name: str) -> bool:
    key = _KEYS.get(name)
    return key is not None and all(isinstance(item, dict) and key in item for item in items)


def _closed(value: Any) -> Any:
    """Turn items that are addressed by key back into lists."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(step, tuple) for step in value):
        return [_closed(item) for item in value.values()]
    return {step: _closed(inner) for step, inner in value.items()}
