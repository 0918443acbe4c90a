"""`bench isolation`: one wrong turn among many, or an engine that did not page, fails the command."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import isolation
from bench.isolation import GroupVersions, Result
from tests.harness import a_turn

from marlaas_api.messages import Turn

GROUPS, MEMBERS = 500, 4
PINNED = GroupVersions(first=3, last=3, pinned=2)


def turn(index: int, member: int, version: int) -> Turn:
    names = {"namespace": f"team-{index % 4}", "uid": f"u{index % 4}", "group": f"g{index}"}
    return a_turn(**names, member=member, episode=f"g{index}-{member}", version=version)


@pytest.fixture
def result() -> Result:
    """2,000 right turns: every third group is pinned to version 2, the others have the newest, 3."""
    groups = {f"g{index}": PINNED if index % 3 == 0 else replace(PINNED, pinned=None) for index in range(GROUPS)}
    turns = [turn(index, member, 3 if index % 3 else 2) for index in range(GROUPS) for member in range(MEMBERS)]
    return Result(turns, groups, [1e-6] * len(turns), [0.3] * 10, len(turns), num_loads=90, num_reloads=80, seconds=4.0)


def at(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def run(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(chosen: argparse.Namespace, folder: Path) -> Result:
        return result

    monkeypatch.setattr(isolation, "measure", measured)
    isolation.main([])


def test_right_turns_pass_and_loads_are_printed(result, monkeypatch, capsys):
    run(result, monkeypatch)
    printed = capsys.readouterr().out
    for row in ("turns | 2000", "tenants | 4", "loads / of evicted versions | 90 / 80", "turns of another adapter | 0"):
        assert f"| {row} |" in printed


@pytest.mark.parametrize("gap", [0.002, 0.3, float("nan")])
def test_one_turn_of_another_adapter_among_2000_fails_the_command(result, monkeypatch, capsys, gap):
    with pytest.raises(SystemExit, match=r"^1 turns of another adapter: g300-1$"):
        run(replace(result, gaps=at(result.gaps, 1201, gap)), monkeypatch)
    assert "| turns of another adapter | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("index", "member", "version"), [(300, 1, 3), (301, 1, 2), (301, 1, 4)], ids=["pinned", "mixed", "too new"]
)
def test_one_turn_of_a_version_that_was_not_requested_fails_the_command(result, monkeypatch, index, member, version):
    turns = at(result.turns, MEMBERS * index + member, turn(index, member, version))
    with pytest.raises(SystemExit, match=rf"^1 turns of a version that was not requested: g{index}-{member}$"):
        run(replace(result, turns=turns), monkeypatch)
