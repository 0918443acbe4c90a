"""Suggestions for misspelled names."""

import difflib
from collections.abc import Iterable


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
