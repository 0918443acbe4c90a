"""Read the files named on a command line and parse their YAML documents into MARLaaS objects. Each error becomes a finding."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlaas.manifest.documents import Document, YamlError, read_documents
from marlaas.manifest.findings import Finding, Placed, Source
from marlaas_api.kinds import API_VERSION, GROUP, KINDS, Kind
from marlaas_api.kinds.fields import did_you_mean, listed, nearest
from marlaas_api.kinds.problems import InvalidObject, Problem, found, parse

STDIN = "-"
_STDIN_LABEL = "<stdin>"
_MAX_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class File:
    """Text of one file; `label` is its name in errors."""

    label: str
    folder: Path
    text: str


_pipes: dict[object, bytes] = {}
"""What was read from pipes, by the stream or the path: they give their content once, and a run reads its manifests again."""


def read_files(paths: Sequence[str]) -> Iterator[File | Finding]:
    """Yield for every path its text, or a finding with the error. `-` is standard input; a path may be a pipe (`<(…)`)."""
    for path in paths:
        yield _read_standard_input() if path == STDIN else _read_file(path)


def without_pipes(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths with one `-` in place of all pipes and standard input."""
    return tuple(dict.fromkeys(STDIN if _is_pipe(path) else path for path in paths))


def piped(paths: Sequence[str]) -> bytes:
    """Return what `read_files` has read from the pipes among the paths, as one manifest; empty if there are none."""
    read = [_pipes[sys.stdin.buffer if path == STDIN else path] for path in paths if _is_pipe(path)]
    return b"\n---\n".join(read)


def _is_pipe(path: str) -> bool:
    return path == STDIN or Path(path).is_fifo()


def _read_standard_input() -> File | Finding:
    stream = sys.stdin.buffer
    if stream not in _pipes:
        _pipes[stream] = stream.read(_MAX_BYTES + 1)
    return _decoded(_STDIN_LABEL, Path.cwd(), _pipes[stream])


def _read_file(path: str) -> File | Finding:
    try:
        if Path(path).is_fifo():
            if path not in _pipes:
                _pipes[path] = _bytes(path)
            return _decoded(path, Path.cwd(), _pipes[path])
        data = _bytes(path)
    except FileNotFoundError:
        return Finding(path, 0, "", f"no such file{_similar(Path(path))}")
    except IsADirectoryError:
        return Finding(path, 0, "", f"a folder; name its files, for example {Path(path) / '*.yaml'}")
    except OSError as error:
        return Finding(path, 0, "", f"cannot be read: {error.strerror}")
    return _decoded(path, Path(path).resolve().parent, data)


def _bytes(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def _decoded(label: str, folder: Path, data: bytes) -> File | Finding:
    if len(data) > _MAX_BYTES:
        return Finding(label, 0, "", f"not a manifest: larger than {_MAX_BYTES // 2**20} MiB")
    try:
        return File(label, folder, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Finding(label, line, "", f"not UTF-8 text: byte 0x{data[error.start]:02x}")


def _similar(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    found = nearest(path.name, (sibling.name for sibling in path.parent.iterdir() if sibling.is_file()))
    return f"; did you mean {path.with_name(found)}?" if found else ""


_PLACEHOLDER = re.compile(r"\{\{.{0,60}?\}\}")
_BY_NAME = {kind.__name__: kind for kind in KINDS}
_OURS = f"the kinds are {listed(_BY_NAME)}"


@dataclass(slots=True)
class Objects:
    """Objects of the files, with errors and notes.

    `broken` holds (kind, name) of objects with errors, so that they are not also reported as missing.
    """

    placed: list[Placed[Kind]] = field(default_factory=list)
    broken: set[tuple[str, str]] = field(default_factory=set)
    errors: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def read_objects(file: File, objects: Objects) -> None:
    """Add a file's objects, errors and notes."""
    documents: list[Document] = []
    try:
        for document in read_documents(file.text):
            documents.append(document)
            for source, body in _bodies(file, document):
                _read_one(source, body, objects)
    except YamlError as error:
        objects.errors.append(Finding(file.label, error.line, "", f"{error}{_template_hint(file.text)}"))
    else:
        if not documents:
            objects.errors.append(Finding(file.label, 0, "", "contains no objects"))


def _template_hint(text: str) -> str:
    """Return a hint if a text has placeholders of a template engine."""
    found = _PLACEHOLDER.search(text)
    return f"; {found[0]} is a placeholder of a template: render the template first" if found else ""


def _bodies(file: File, document: Document) -> Iterator[tuple[Source, Any]]:
    """Yield the objects of a document: a single one, or the items of a kubectl `List`."""
    value = document.value
    if isinstance(value, dict) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        for at, item in enumerate(value["items"]):
            yield Source(file.label, file.folder, document, ("items", at)), item
    else:
        yield Source(file.label, file.folder, document), value


def _read_one(source: Source, body: Any, objects: Objects) -> None:
    kind = _kind_of(body)
    if isinstance(kind, Problem):
        objects.errors.append(source.finding(kind))
    elif kind is None:
        text = f"skipped {body['kind']} {_name(body)!r}: it is not a MARLaaS kind"
        objects.notes.append(Finding(source.file, source.line(), "", text))
    else:
        _parse(source, kind, body, objects)


def _kind_of(body: Any) -> type[Kind] | Problem | None:
    """Return the kind of an object, a problem, or None for objects of other API groups."""
    if not isinstance(body, dict):
        return Problem((), f"expected an object with apiVersion, kind, metadata and spec, found {found(body)}")
    version, name = body.get("apiVersion"), body.get("kind")
    for key, value in (("apiVersion", version), ("kind", name)):
        if not isinstance(value, str):
            return Problem((key,), "required, but missing" if value is None else f"expected text, found {found(value)}")
    kind = _BY_NAME.get(str(name))
    if version == API_VERSION:
        return kind or Problem(("kind",), f"unknown kind {name!r}; {_OURS}{did_you_mean(str(name), _BY_NAME)}")
    if kind is not None or str(version).partition("/")[0] == GROUP:
        return Problem(("apiVersion",), f"must be {API_VERSION}, found {version!r}")
    return None


def _parse(source: Source, kind: type[Kind], body: dict[str, Any], objects: Objects) -> None:
    try:
        parsed = parse(kind, {key: value for key, value in body.items() if key != "status"})
    except InvalidObject as error:
        objects.errors.extend(source.findings(error.problems))
        objects.broken.add((kind.__name__, _name(body)))
    else:
        objects.placed.append(Placed(parsed, source))


def _name(body: dict[str, Any]) -> str:
    metadata = body.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
