"""Rows of text files, JSON lines and CSV: where each row begins, and reading one row without the others."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marlaas.envs.dataset.problems import RowProblem

_BOM = b"\xef\xbb\xbf"
MAX_CELL = 64 << 20


@dataclass(frozen=True, slots=True)
class Scanned:
    """One row of a scan. start: offset in bytes. row: its columns, or the reason why it has none."""

    start: int
    line: int
    row: dict[str, Any] | RowProblem


class TextRows:
    """Rows of a file whose beginnings are known; the file is opened for each row.

    Args:
        file: the text; of a compressed file its copy in the cache.
        starts, lines: offset in bytes and line of each row.
    """

    def __init__(self, file: Path, starts: "np.ndarray[Any, Any]", lines: "np.ndarray[Any, Any]") -> None:
        self._file, self._starts, self._lines = file, starts, lines
        self._is_csv = file.suffix == ".csv"

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> dict[str, Any]:
        """Return the columns of a row. Raises RowProblem if the file is no longer what it was."""
        with self._file.open("rb") as file:
            columns = next(filter(None, _cells(file, 1))) if self._is_csv else ()
            file.seek(int(self._starts[number]))
            if self._is_csv:
                return _named(next(_cells(file, self.line(number)), []), columns)
            return _parsed(file.readline())

    def line(self, number: int) -> int:
        """Return the line of a row, counted from 1."""
        return int(self._lines[number])

    def place(self, number: int) -> str:
        """Return the place of a row within its file."""
        return str(self.line(number))


def scan(file: Path) -> Iterator[Scanned]:
    """Yield every row of a file, in order; blank lines are left out."""
    yield from _scan_csv(file) if file.suffix == ".csv" else _scan_jsonl(file)


def _scan_jsonl(path: Path) -> Iterator[Scanned]:
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                try:
                    yield Scanned(start, number, _parsed(line))
                except RowProblem as problem:
                    yield Scanned(start, number, problem)
            start += len(line)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"the line is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowProblem(f'the line is {type(row).__name__}; expected an object, {{"column": value, …}}')
    return row


class _Lines:
    """Decodes lines for the CSV reader, and counts the bytes and lines that it has taken."""

    def __init__(self, file: io.BufferedReader, line: int) -> None:
        self._file, self.num_bytes, self.line = file, file.tell(), line

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            begins = self.num_bytes == 0
            self.num_bytes += len(line)
            self.line += 1
            try:
                yield (line.removeprefix(_BOM) if begins else line).decode()
            except UnicodeDecodeError as error:
                raise RowProblem(f"the line is not UTF-8: {error}") from None


def _cells(file: io.BufferedReader, line: int) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_CELL)
    return csv.reader(iter(_Lines(file, line)), strict=True)


def _scan_csv(path: Path) -> Iterator[Scanned]:
    csv.field_size_limit(MAX_CELL)
    with path.open("rb") as file:
        lines = _Lines(file, 1)
        reader = csv.reader(iter(lines), strict=True)
        columns: Sequence[str] | None = None
        while True:
            start, line = lines.num_bytes, lines.line
            try:
                cells = next(reader)
            except StopIteration:
                return
            except (RowProblem, csv.Error) as error:  # where the next row begins is not known
                yield Scanned(start, line, RowProblem(f"the file is not CSV from here on: {error}"))
                return
            if not cells:
                continue
            if columns is None:
                columns = cells
                continue
            try:
                yield Scanned(start, line, _named(cells, columns))
            except RowProblem as problem:
                yield Scanned(start, line, problem)


def _named(cells: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise RowProblem(f"the row has {len(cells)} cells; the first line names {len(columns)} columns")
    return dict(zip(columns, cells, strict=True))
