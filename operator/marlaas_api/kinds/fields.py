"""Lookup of the kinds' fields by their path in a manifest, and suggestions for misspelled names."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the closest of the names, None if none is close. Case, hyphens and underscores are ignored."""
    by_shape = {_shape(candidate): candidate for candidate in sorted(names, reverse=True)}
    found = difflib.get_close_matches(_shape(name), by_shape, n=1, cutoff=0.6)
    return by_shape[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'NAME'?`, or nothing if no name is near."""
    found = nearest(name, names)
    return f"; did you mean '{found}'?" if found else ""


def listed(names: Iterable[str]) -> str:
    """Return the names as `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _shape(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


Loc = tuple[str | int, ...]


def field_names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of a model in the manifest's spelling, in the order of the schema."""
    return tuple(_by_key(model))


def field_at(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    """Return the field at a path; None if there is no such field."""
    names = [part for part in loc if isinstance(part, str)]
    owner = model_at(model, tuple(names[:-1])) if names else None
    return _by_key(owner).get(names[-1]) if owner is not None else None


def model_at(model: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    """Return the model of the object at a path, ignoring list positions; None if there is none."""
    here: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, str):
            info = _by_key(here).get(part) if here is not None else None
            here = _model_in(info.annotation) if info is not None else None
    return here


def find_field(model: type[BaseModel], key: str) -> Loc | None:
    """Return the path of the only field of this name below the model's `spec`; None if there is none, or several.

    A field outside of lists counts before those in their entries, which repeat fields of the object itself.
    """
    spec = model_at(model, ("spec",))
    paths = [path for path in _paths(spec, ("spec",)) if path[-1] == key] if spec is not None else []
    outside = [path for path in paths if not any(str(part).endswith("[]") for part in path)]
    found = outside or paths
    return found[0] if len(found) == 1 else None


def _paths(model: type[BaseModel], at: Loc) -> Iterator[Loc]:
    for key, info in _by_key(model).items():
        yield (*at, key)
        inner = _model_in(info.annotation)
        if inner is not None:
            yield from _paths(inner, (*at, f"{key}[]" if _is_list(info.annotation) else key))


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_is_list(argument) for argument in get_args(annotation))


def _by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside Optional, Annotated and tuples; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _model_in(argument)) is not None), None)
