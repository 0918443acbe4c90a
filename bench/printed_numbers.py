"""The numbers that a measurement prints, by name, so that the output of two trees can be compared. Pure.

Of a JSON object a number is named by its path; of a Markdown table, and of columns that are two or more spaces apart, by the
row's first cell and the column's header; of any other line by the words around it. The same name in another line gets a
number.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from bench.rounds import spread

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
_GAP = re.compile(r"\s{2,}")
_RULE = re.compile(r"\|( *:?-+:? *\|)+")
TENTH = 0.1


def numbers(output: str) -> dict[str, float]:
    """Return the numbers of an output."""
    found: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for name, value in _all_of(output.splitlines()):
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = value
    return found


def _all_of(lines: Sequence[str]) -> Iterator[tuple[str, float]]:
    headers: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = _cells(line)
        if line.startswith("{"):
            yield from _of_object(json.loads(line))
        elif _RULE.fullmatch(line.strip()):
            continue
        elif _RULE.fullmatch(following.strip()) or not _NUMBER.search(line):
            headers = cells if line.startswith("|") else ["", *cells]
        elif len(cells) == len(headers) > 1 and headers[-1]:
            yield from _of_row(headers, cells)
        else:
            yield from _of_line(line)


def _of_object(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        texts = " ".join(str(one) for one in value.values() if isinstance(one, str))
        start = " ".join(filter(None, (path, texts)))
        for key, one in value.items():
            yield from _of_object(one, f"{start}.{key}" if start else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def _cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table, or of columns."""
    text = line.strip()
    return [cell.strip() for cell in text.strip("|").split("|")] if text.startswith("|") else _GAP.split(text)


def _of_row(headers: Sequence[str], cells: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the first number of each cell but the first."""
    row = f"{headers[0]} {cells[0]}".strip()
    for header, cell in zip(headers[1:], cells[1:], strict=True):
        if match := _NUMBER.search(cell):
            yield f"{row}: {header}", _value(match)


def _of_line(line: str) -> Iterator[tuple[str, float]]:
    words = " ".join(_NUMBER.sub("…", line).split())
    for place, match in enumerate(_NUMBER.finditer(line)):
        yield f"{words} [{place}]", _value(match)


def _value(match: re.Match[str]) -> float:
    return float(match[0].replace(",", ""))


def compared(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[list[str]]:
    """Return a row for each number of both sides: name, both medians, and the ratio after / before, paired by round.

    pairs: the numbers before and after of each round. Numbers that are the same on both sides of all rounds are left out:
    they are settings. So are zeros before.
    """
    names = [name for name in pairs[0][0] if all(name in side for pair in pairs for side in pair)]
    rows = []
    for name in names:
        sides = [[side[name] for side in pair] for pair in pairs]
        if all(before == after for before, after in sides) or not all(before for before, _ in sides):
            continue
        ratios = [after / before for before, after in sides]
        middles = [f"{median(side):.4g}" for side in zip(*sides, strict=True)]
        rows.append([name, *middles, spread(ratios), "yes" if abs(median(ratios) - 1) <= TENTH else "**no**"])
    return rows


def unmatched(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[str]:
    """Return the names of numbers that only some outputs have."""
    sides = [side for pair in pairs for side in pair]
    return sorted({name for side in sides for name in side if not all(name in other for other in sides)})
