"""`marlaas run` lets the same fields change as the API server does."""

import re
from collections.abc import Iterator

import pytest

from marlaas.local.documents import CHANGEABLE
from marlaas_api.kinds import RLJobSpec, Spec
from marlaas_api.kinds.base import NO_CHANGE
from marlaas_api.reason_texts import TEXTS
from marlaas_api.reasons import Reason

PARTS_OF_A_POOL = {"rollout.memory", "trainer.memory", "model"}


def changeable(part: type[Spec], prefix: str = "") -> Iterator[str]:
    """Fields without the rule that they cannot change, which do not lie in one with it either."""
    for field in part.model_fields.values():
        if NO_CHANGE[1] in str(field.json_schema_extra):
            continue
        path, kind = f"{prefix}{field.alias}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Spec):
            yield from changeable(kind, f"{path}.")
        else:
            yield path


def test_the_fields_that_may_change_are_those_that_the_kinds_do_not_fix() -> None:
    assert set(changeable(RLJobSpec)) == CHANGEABLE


@pytest.mark.parametrize("reason", Reason)
def test_no_advice_is_to_change_what_cannot_change(reason: Reason) -> None:
    advice = TEXTS[reason].advice
    named = {path.rstrip(".") for path in re.findall(r"spec\.([A-Za-z.]+)", advice)} - PARTS_OF_A_POOL
    if "a job's own" in advice or any(path not in CHANGEABLE for path in named):
        assert re.search(r"\banew\b|\bnew (?:job|one)\b|create a pool", advice), advice
