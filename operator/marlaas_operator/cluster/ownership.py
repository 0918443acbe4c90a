"""Server-side apply in small: which leaves of an object a manager set, and what applying again does to them. Pure; for the fake.

An object is taken apart into leaves by path. Items of the lists that Kubernetes merges by key are addressed by that key.
"""

from collections.abc import Iterator
from typing import Any

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
    """A body's leaves; an empty map or list is one."""
    return dict(_walk(value, (), ""))


def rebuilt(parts: Leaves) -> dict[str, Any]:
    """The body that has these leaves."""
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
    """The body after a manager that owned these leaves applied `desired`."""
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
    """Items that were addressed by key become a list again."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(step, tuple) for step in value):
        return [_closed(item) for item in value.values()]
    return {step: _closed(inner) for step, inner in value.items()}
