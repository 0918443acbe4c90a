"""The provisioner: which volumes are made for which claims, and which are removed."""

from pathlib import Path
from typing import Any

import pytest

from marlaas_e2e.node.volumes import folder_of, missing_volumes, released_volumes

FOLDER = Path("/volumes")


def claim(phase: str = "Pending", storage_class: str = "folder", **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"storage": "1Gi"}}
    wanted = {"storageClassName": storage_class, "accessModes": ["ReadWriteOnce"], "resources": resources}
    return {
        "metadata": {"namespace": "a", "name": "data", "uid": "u1"},
        "spec": {**wanted, **spec},
        "status": {"phase": phase},
    }


def test_a_pending_claim_gets_a_folder_bound_to_it() -> None:
    [volume] = missing_volumes([claim()], [], FOLDER)
    assert folder_of(volume) == FOLDER / "folder-u1"
    assert volume["spec"]["claimRef"]["uid"] == "u1"
    assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert volume["spec"]["capacity"] == {"storage": "1Gi"}


@pytest.mark.parametrize("other", [claim("Bound"), claim(storage_class=""), claim(volumeName="chosen")])
def test_claims_that_are_bound_or_anothers_get_none(other: dict[str, Any]) -> None:
    assert missing_volumes([other], [], FOLDER) == []


def test_a_claim_whose_volume_is_there_already_gets_no_second_one() -> None:
    made = missing_volumes([claim()], [], FOLDER)
    assert missing_volumes([claim()], made, FOLDER) == []


def test_only_our_own_released_volumes_are_removed() -> None:
    [volume] = missing_volumes([claim()], [], FOLDER)
    released = {**volume, "status": {"phase": "Released"}}
    bound = {**volume, "status": {"phase": "Bound"}}
    foreign = {"metadata": {"name": "x"}, "spec": {}, "status": {"phase": "Released"}}
    assert released_volumes([released, bound, foreign]) == [released]
