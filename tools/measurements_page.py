"""Generator of docs/reference/measurements.md from bench/results/; with --check, compare the file with the results.

A file of bench/results/ is a section, and each of its claims a row: what was measured, the figure, the machine, the
commit that recorded it, and the command that measures it again.
"""

import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tools.api_docs import MAX_CELL, write_or_check

RESULTS = Path(__file__).parents[1] / "bench" / "results"
SECTIONS = ("learning", "time", "proof", "tenants", "fairness", "agents", "memory", "scale", "kubernetes", "gpu")
"""Files of RESULTS, in the order of the page."""
MACHINES = {"avx512": "AVX-512", "avx2": "AVX2", "h200": "H200"}
_PREFACE = """# Measurements

Generated from `bench/results/` by `make crds`; do not edit.

Each row is a claim: what was measured, its figure, the target, the machine with the date, the commit that recorded the figure, and the command that measures it again.
Two machines have 2 cores and no GPU: one with AVX-512, the other, an AMD EPYC, with AVX2 only. The third has an NVIDIA H200 (143 GB).
*Shared* means that other work ran on the machine, *loaded* that its load was 13 to 35.
Numbers are in float32 unless stated otherwise. Compare ratios, not seconds.
A target that was not reached is marked **missed**; a goal is more than the target asks for.

`make bench` runs all benchmarks (about an hour and a half; the first `trl` bench installs TRL into the cache); `python -m bench NAME` runs one.
"""
_Cell = Annotated[str, Field(min_length=1, max_length=MAX_CELL)]


class Claim(BaseModel):
    """One row. `met` is whether the target was reached; None if nothing was required."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    claim: _Cell
    figure: _Cell
    target: str = ""
    met: bool | None
    machine: Annotated[str, Field(pattern=f"^({'|'.join(MACHINES)})$")]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    load: Annotated[str, Field(pattern="^(|shared|loaded)$")] = ""
    commit: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
    command: _Cell


class Section(BaseModel):
    """One file of bench/results/."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str
    about: str
    claims: tuple[Claim, ...]


def sections() -> list[Section]:
    """Return the sections in the page's order. Raises ValueError if a file is missing from SECTIONS or an id stands twice."""
    if {path.stem for path in RESULTS.glob("*.json")} != set(SECTIONS):
        raise ValueError(f"the files of {RESULTS} are not SECTIONS: {', '.join(SECTIONS)}")
    read = TypeAdapter(Section).validate_json
    found = [read((RESULTS / f"{name}.json").read_bytes()) for name in SECTIONS]
    ids = [claim.id for section in found for claim in section.claims]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise ValueError(f"ids of claims stand twice: {', '.join(sorted(twice))}")
    return found


def page() -> str:
    """Return the whole page."""
    return _PREFACE + "".join(_section(section) for section in sections())


def _section(section: Section) -> str:
    about = f"{section.about}\n\n" if section.about else ""
    head = "| claim | figure | target | machine | commit | command |\n|---|---|---|---|---|---|\n"
    return f"\n## {section.title}\n\n{about}{head}" + "".join(_row(claim) for claim in section.claims)


def _row(claim: Claim) -> str:
    missed = ": **missed**" if claim.met is False else ""
    machine = ", ".join(word for word in (MACHINES[claim.machine], claim.date, claim.load) if word)
    command = claim.command if " script" in claim.command else f"`{claim.command}`"
    cells = (
        f'<a id="{claim.id}"></a>{claim.claim}',
        claim.figure,
        claim.target + missed,
        machine,
        claim.commit,
        command,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check compare it; return 0 on success, 1 if the file is stale."""
    return write_or_check("tools.measurements_page", page, arguments)


if __name__ == "__main__":
    sys.exit(main())
