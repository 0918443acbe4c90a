"""Parse YAML documents into MARLaaS objects."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from marlaas.manifest.documents import Document, YamlError, read_documents
from marlaas.manifest.files import File
from marlaas.manifest.findings import Finding, Placed, Source
from marlaas_api.kinds import API_VERSION, GROUP, KINDS, Kind
from marlaas_api.kinds.fields import did_you_mean, listed
from marlaas_api.kinds.problems import InvalidObject, Problem, found, parse

_BY_NAME = {kind.__name__: kind for kind in KINDS}
_OURS = f"MARLaaS knows {listed(_BY_NAME)}"


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
        objects.errors.append(Finding(file.label, error.line, "", str(error)))
    else:
        if not documents:
            objects.errors.append(Finding(file.label, 0, "", "holds no objects"))


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
        text = f"skipped {body['kind']} {_name(body)!r}: no kind of MARLaaS"
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
