"""Findings about a manifest, with file and line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from marlaas.manifest.documents import Document
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import Kind
from marlaas_api.kinds.problems import Loc, Problem

K = TypeVar("K", bound=Kind, covariant=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `line` 0: about the whole file; `file` empty: about all files together."""

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.path, self.text) if part)


class InvalidManifest(InvalidInput):
    """Invalid manifests, with all findings, one per line."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True)
class Source:
    """Place of an object: its file, the file's folder, its document, and its path in the document."""

    file: str
    folder: Path
    document: Document
    prefix: Loc = ()

    @property
    def body(self) -> Any:
        """The object as written, without defaults."""
        value = self.document.value
        for step in self.prefix:
            value = value[step]
        return value

    def line(self, loc: Loc = ()) -> int:
        """Return the line of a field of the object."""
        return self.document.line((*self.prefix, *loc))

    def finding(self, problem: Problem) -> Finding:
        """Convert a problem to a finding with file and line."""
        return Finding(self.file, self.line(problem.loc), problem.path, problem.text)

    def findings(self, problems: Iterable[Problem]) -> tuple[Finding, ...]:
        """Convert problems to findings with file and line."""
        return tuple(self.finding(problem) for problem in problems)


@dataclass(frozen=True, slots=True)
class Placed(Generic[K]):
    """An object with its place."""

    object: K
    source: Source

    @property
    def place(self) -> str:
        """File and line, for references in other findings."""
        return f"{self.source.file}:{self.source.line()}"
