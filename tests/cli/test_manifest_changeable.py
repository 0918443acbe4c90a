"""`marlaas run` lets the same fields change as the API server does."""

from collections.abc import Iterator

from marlaas.local.documents import CHANGEABLE
from marlaas_api.kinds import RLJobSpec, Spec
from marlaas_api.kinds.base import FIXED


def changeable(part: type[Spec], prefix: str = "") -> Iterator[str]:
    """Fields that are not marked FIXED, nor lie in one that is."""
    for field in part.model_fields.values():
        if field.json_schema_extra and FIXED.items() <= dict(field.json_schema_extra).items():
            continue
        path, kind = f"{prefix}{field.alias}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Spec):
            yield from changeable(kind, f"{path}.")
        else:
            yield path


def test_the_fields_that_may_change_are_those_that_the_kinds_do_not_fix() -> None:
    assert set(changeable(RLJobSpec)) == CHANGEABLE
