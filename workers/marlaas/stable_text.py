"""Text by which a task's content is told from other content, the same in every process and run."""

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from marlaas_api.errors import InvalidInput

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    enum.Enum,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
    uuid.UUID,
)
_NO_REPR: Any = object.__repr__
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_text(content: object) -> str:
    """Return `repr(content)` if it is the same in every process.

    Raises:
        InvalidInput: the text has an address, as that of a function or of an object without a `__repr__`, or the order of a
            set, which differs between processes.
    """
    _require_stable(content, "it")
    return repr(content)


def _require_stable(value: Any, where: str) -> None:
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, Mapping):
        for key, one in value.items():
            _require_stable(key, f"a key of {where}")
            _require_stable(one, f"{where}[{key!r}]")
    elif isinstance(value, Sequence):
        for number, one in enumerate(value):
            _require_stable(one, f"{where}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            _require_stable(getattr(value, part.name), f"{where}.{part.name}")
    elif isinstance(value, set | frozenset) or type(value).__repr__ is _NO_REPR or _ADDRESS.search(repr(value)):
        raise InvalidInput(
            f"{where} is a {type(value).__name__}, of which no text is the same in every process, so that a restart could train held-out tasks: "
            "leave it out of the content, or pass `text=`, a function that returns the text that identifies the content"
        )
