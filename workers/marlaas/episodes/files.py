"""Files of a job's episodes: `episodes.jsonl`, one line per ended episode, and older parts as `episodes-0001.jsonl.gz`, ….

Bounded: a full open part is compressed, and the oldest parts are deleted once all parts exceed the limit.
Crash-safe: a line that a kill cut off is removed at the next start, and a compressed part is complete before a
rename makes it visible. Readers need no lock.
"""

import gzip
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from marlaas.episodes.record import EpisodeRecord
from marlaas.local.folder import translated
from marlaas_api.errors import InvalidInput

OPEN = "episodes.jsonl"
DEFAULT_BYTES = 256 << 20
"""Default disk limit for one job's episodes. Compressed, a short one-turn episode takes about 0.1 KB, a thousand tokens 3 KB."""
_OPEN_BYTES = 16 << 20
_PART = re.compile(r"episodes-(\d{4,})\.jsonl\.gz")


def parts(folder: Path) -> list[Path]:
    """Return the closed parts, oldest first."""
    return sorted(path for path in folder.glob("episodes-*.jsonl.gz") if _PART.fullmatch(path.name))


@dataclass(slots=True)
class EpisodeWriter:
    """Writer of one job's episodes. It skips episodes that the open part already holds."""

    folder: Path
    max_bytes: int = DEFAULT_BYTES
    _known: set[str] | None = field(default=None)

    def append(self, records: Iterable[EpisodeRecord]) -> None:
        """Append new episodes. Raises InvalidInput if the folder cannot be written."""
        if self.max_bytes <= 0:
            return
        with translated(self._open):
            known = self._recovered()
            new = {record.episode: record for record in records if record.episode not in known}
            self._write(new.values())
            known.update(new)
            if self._open.exists() and self._open.stat().st_size >= min(_OPEN_BYTES, self.max_bytes // 4):
                self._close_part(known)

    @property
    def _open(self) -> Path:
        return self.folder / OPEN

    def _recovered(self) -> set[str]:
        """Return the ids in the open part, after removing a line that a kill cut off."""
        if self._known is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._known = set()
            if self._open.exists():
                content = self._open.read_bytes()
                whole = content.rfind(b"\n") + 1
                if whole < len(content):
                    os.truncate(self._open, whole)
                self._known = {record.episode for record in _lines(self._open, content[:whole].splitlines())}
        return self._known

    def _write(self, records: Collection[EpisodeRecord]) -> None:
        if records:
            lines = [record.model_dump_json(exclude_defaults=True).encode() + b"\n" for record in records]
            with self._open.open("ab") as file:
                file.write(b"".join(lines))

    def _close_part(self, known: set[str]) -> None:
        closed = parts(self.folder)
        match = _PART.fullmatch(closed[-1].name) if closed else None
        target = self.folder / f"episodes-{int(match[1]) + 1 if match else 1:04d}.jsonl.gz"
        partial = target.with_name(f".{target.name}.partial")
        with self._open.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(source, compressed)
        partial.replace(target)
        self._open.unlink()
        known.clear()
        self._drop_oldest([*closed, target])

    def _drop_oldest(self, closed: list[Path]) -> None:
        sizes = {path: path.stat().st_size for path in closed}
        room = self.max_bytes - min(_OPEN_BYTES, self.max_bytes // 4)
        for path in closed[:-1]:
            if sum(sizes.values()) <= room:
                return
            path.unlink()
            del sizes[path]


def read(folder: Path) -> Iterator[EpisodeRecord]:
    """Yield every kept episode, oldest first, also while a run writes. If a group's member was played more than once, the first counts.

    Raises:
        InvalidInput: a line is not an episode.
    """
    seen: set[tuple[str, int]] = set()
    for record in read_all(folder):
        if (record.group, record.member) not in seen:
            seen.add((record.group, record.member))
            yield record


def read_all(folder: Path) -> Iterator[EpisodeRecord]:
    """Yield every kept episode, also repeated plays of a group's member. A part that is closed meanwhile is read twice.

    Raises:
        InvalidInput: a line is not an episode.
    """
    # The open part is opened before the closed ones are listed: otherwise one that is closed in between would be missed.
    path = folder / OPEN
    current = path.open("rb") if path.exists() else None
    try:
        for part in parts(folder):
            with gzip.open(part, "rb") as lines:
                yield from _lines(part, lines)
        if current is not None:
            yield from _lines(path, current)
    finally:
        if current is not None:
            current.close()


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[EpisodeRecord]:
    for number, line in enumerate(lines, 1):
        try:
            yield EpisodeRecord.model_validate_json(line)
        except ValidationError as error:
            if isinstance(lines, list) or line.endswith(b"\n"):
                raise InvalidInput(f"{path}:{number} is not an episode of this version of marlaas") from error


class EpisodeFollower:
    """Reads the episodes that are appended after its creation, also when the open part is replaced."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / OPEN
        self._file: IO[bytes] | None = None
        self._rest = b""
        if self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(0, os.SEEK_END)

    def news(self) -> list[EpisodeRecord]:
        """Return the episodes since the last call. Raises InvalidInput."""
        found = self._complete()
        if self._path.exists() and not self._is_current():
            self.close()
            self._file, self._rest = self._path.open("rb"), b""
            found += self._complete()
        return found

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _complete(self) -> list[EpisodeRecord]:
        if self._file is None:
            return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return list(_lines(self._path, lines))

    def _is_current(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_ino == self._path.stat().st_ino
