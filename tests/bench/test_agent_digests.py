"""`bench agents --only digests`: the jobs that are compared, and the verdict."""

import pytest
from bench.agent_digests import HEADERS, rows_of

TEAM = {"solver": ["s0", "s1"], "verifier": ["v0", "v1"]}


@pytest.mark.parametrize(
    ("own", "told"),
    [(["v0", "v1"], "same"), (["v0", "v2"], "different"), (["v0"], "different")],
)
def test_every_version_counts(own: list[str], told: str) -> None:
    rows = rows_of(7, {"team": TEAM, "solver": {"solver": ["s0", "s1"]}, "verifier": {"verifier": own}})
    assert rows == [
        [7, "solver", "0 to 1", "s1", "s1", "same"],
        [7, "verifier", "0 to 1", "v1", own[-1], told],
    ]
    assert len(rows[0]) == len(HEADERS)


def test_an_agent_that_never_changed_proves_nothing() -> None:
    still = {"solver": ["s0", "s0"], "verifier": ["v0", "v1"]}
    digests = {"team": still, "solver": {"solver": ["s0", "s0"]}, "verifier": {"verifier": ["v0", "v1"]}}
    assert [row[-1] for row in rows_of(0, digests)] == ["never changed", "same"]
