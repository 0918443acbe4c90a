"""Generator of the field reference from the CustomResourceDefinitions: `python -m tools.api_docs [--check] FILE`."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marlaas_api.kinds import API_VERSION, KINDS, Kind
from marlaas_api.kinds.base import expected_text
from marlaas_api.kinds.status import CONDITIONS
from marlaas_api.names import DNS_LABEL
from tools.crd import PRESENTATIONS, Presentation, number_text, value_text
from tools.structural import kind_schema


def write_or_check(module: str, page: Callable[[], str], arguments: Sequence[str] | None) -> int:
    """Run `python -m MODULE [--check] FILE`; return 0 on success, 1 if the file is stale."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Generate a page of docs/.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    options = parser.parse_args(arguments)
    if not options.check:
        options.file.write_text(page(), encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{options.file} is stale, it is not what {module} gives: run `make crds`\n")
    return 1


Schema = Mapping[str, Any]
MAX_CELL = 160
"""Characters of a table's cell. What is longer stands below the table."""

_PREFACE = f"""# The kinds of `{API_VERSION}`, field by field

Generated from `crds/` by `make crds`; do not edit. `kubectl explain rljob.spec.training` says the same in a terminal.

A field without a default may be absent; its text says what that means.
The API server fills in defaults, so `kubectl get -o yaml` shows them.
`kubectl apply` and `marlaas validate` refuse unknown fields.
A field that is "fixed" cannot change while the object exists.
A DNS label has lower-case letters, digits and '-', and begins and ends with a letter or digit (no dots).
The sentences under "Rules" are the API server's answers when a rule is broken.
`tests/crds/cases/` has an accepted and a refused value of every bound and rule.
The kinds need Kubernetes 1.31 or later.
"""
_SINGULAR = {"characters": "character", "entries": "entry"}


def page() -> str:
    """Return the whole page; the same kinds give the same bytes."""
    return _PREFACE + "".join("\n" + section(kind) for kind in KINDS)


def section(kind: type[Kind]) -> str:
    """Return the section of one kind: its names, fields, status and conditions."""
    body = kind_schema(kind)
    shown = PRESENTATIONS[kind.__name__]
    written: dict[str, Schema] = {}
    spec, status = (
        _objects(body["properties"][part], f"{kind.__name__}.{part}", written) for part in ("spec", "status")
    )
    return "\n".join((_head(kind.__name__, body, shown), *spec, *status, _conditions(kind.__name__)))


def _head(name: str, body: Schema, shown: Presentation) -> str:
    scope = "of a namespace" if shown.scope == "Namespaced" else "of the whole cluster"
    narrow, wide = (
        [heading for heading, _, _, priority in shown.columns if (priority > 0) is far] for far in (False, True)
    )
    columns = ", ".join(narrow) + (f"; with `-o wide` also {', '.join(wide)}" if wide else "")
    called = f"`kubectl get {shown.plural}`, or `{shown.short_names[0]}`"
    return f"## {name}\n{body['description']} An object {scope}; {called}. Columns: {columns}.\n"


def _objects(part: Schema, path: str, written: dict[str, Schema]) -> Iterator[str]:
    """Yield a table for each object, outermost first; an object that has a table already is left out."""
    written[path] = part
    yield _table(part, path, written)
    for name, field in part["properties"].items():
        inner, at = _inner(field, f"{path}.{name}")
        if "properties" in inner and _twin(inner, written) is None:
            yield from _objects(inner, at, written)


def _table(part: Schema, path: str, written: Mapping[str, Schema]) -> str:
    there = {name: field for name, field in part["properties"].items() if not _is_refused(field)}
    rows = [
        _row(name, field, (name in part.get("required", ()), _link(*_inner(field, f"{path}.{name}"), written)))
        for name, field in there.items()
    ]
    more = [f"- `{name}`: {rest}" for name, field in there.items() if (rest := _words(field, "")[1])]
    told = [*_not_there(part), *more, *([""] if more else []), *_rules(part, there)]
    head = [
        f"### {path}",
        part.get("description", ""),
        "",
        "| field | type | default | bounds | meaning |",
        "|---|---|---|---|---|",
    ]
    return "\n".join((*head, *rows, "", *told))


def _is_refused(field: Schema) -> bool:
    """Whether the field is a refused key (`Spec.refused`): expected by users, but deliberately missing."""
    return str(field.get("description", "")).startswith("Refused: ") or "is refused: " in str(
        field.get("description", "")
    )


def _not_there(part: Schema) -> list[str]:
    names = [name for name, field in part["properties"].items() if _is_refused(field)]
    if not names:
        return []
    first = part["properties"][names[0]]["description"].replace(names[0], "each")
    return [f"There is no {', '.join(f'`{name}`' for name in names)}. {first}", ""]


def _rules(part: Schema, there: Mapping[str, Schema]) -> list[str]:
    """Return the messages of the object's own rules and of the rules of its fields that are not objects."""
    own = [
        sentence
        for sentence in _sentences(part)
        if not sentence.startswith(tuple(part["properties"].keys() - there.keys()))
    ]
    of_fields = [
        f"`{name}`: {told}" for name, field in there.items() if "properties" not in field for told in _sentences(field)
    ]
    sentences = [sentence for sentence in (*own, *of_fields) if not _is_fixing(sentence)]
    return ["Rules:", *(f"- {sentence}" for sentence in sentences), ""] if sentences else []


def _row(name: str, field: Schema, known: tuple[bool, str]) -> str:
    required, link = known
    default = "**required**" if required else _default(field)
    cells = (f"`{name}`", _type(field), default, "; ".join(_bounds(field)), _words(field, link)[0])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _words(field: Schema, link: str) -> tuple[str, str]:
    """Return a field's meaning for its row, and the rest of it for the list below the table.

    The row of an object has the first sentence only, because its own table has the whole text.
    """
    text = str(field.get("description", ""))
    first, _, rest = text.partition(". ")
    first = f"{first.rstrip('.')}." if text else ""
    end = f"{' Fixed.' if _is_fixed(field) else ''}{link}"
    is_object = "properties" in _inner(field, "")[0]
    if len(text + end) <= MAX_CELL and not is_object:
        return text + end, ""
    if len(first + end) <= MAX_CELL:
        return first + end, "" if is_object else rest
    return f"Below.{end}", text


def _inner(field: Schema, path: str) -> tuple[Schema, str]:
    """Return the object inside a list, or the field itself, with its path."""
    return (field["items"], f"{path}[]") if "items" in field else (field, path)


def _twin(part: Schema, written: Mapping[str, Schema]) -> str | None:
    """Return the path of an equal object that has a table already."""
    return next((path for path, other in written.items() if other == part), None)


def _link(inner: Schema, path: str, written: Mapping[str, Schema]) -> str:
    if "properties" not in inner:
        return ""
    target = _twin(inner, written) or path
    return f" [Its fields](#{_anchor(target)})."


def _anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_")


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), Mapping):
        return f"map of {_type(field['additionalProperties'])}"
    if field.get("format") == "date-time":
        return "time"
    return str(field.get("type", "any"))


def _default(field: Schema) -> str:
    if "default" not in field or field["default"] == {}:
        return ""
    return f"`{value_text(field['default'])}`"


def _bounds(field: Schema) -> Iterator[str]:
    """Yield the bounds of a value, in words."""
    if "enum" in field:
        yield "one of " + ", ".join(f"`{value_text(choice)}`" for choice in field["enum"])
    elif "pattern" in field and not field.get("x-kubernetes-int-or-string"):
        yield "a DNS label" if field["pattern"] == DNS_LABEL else expected_text(field["pattern"])
    yield from _range(field)
    yield from _sizes(field, "Length", "characters")
    yield from _sizes(field, "Items", "entries")
    yield from _sizes(field, "Properties", "entries")
    if "items" in field and "properties" not in field["items"]:
        yield from (f"each {words}" for words in _bounds(field["items"]))
    if field.get("x-kubernetes-list-type") == "map":
        yield f"no {' and '.join(field['x-kubernetes-list-map-keys'])} twice"
    elif field.get("x-kubernetes-list-type") == "set":
        yield "nothing twice"


def _range(field: Schema) -> Iterator[str]:
    low, high = ("> " if field.get("exclusiveMinimum") else "≥ "), ("< " if field.get("exclusiveMaximum") else "≤ ")
    for key, sign in (("minimum", low), ("maximum", high)):
        if key in field and not (key == "minimum" and field.get("x-kubernetes-int-or-string")):
            yield f"{sign}{number_text(field[key])}"


def _sizes(field: Schema, what: str, units: str) -> Iterator[str]:
    least, most = field.get(f"min{what}"), field.get(f"max{what}")
    if least is not None and least == most:
        yield f"{least} {units}"
        return
    if least is not None:
        yield f"at least {least} {units if least != 1 else _SINGULAR[units]}"
    if most is not None and not field.get("x-kubernetes-int-or-string"):
        yield f"at most {number_text(most)} {units}"


def _sentences(part: Schema) -> Iterable[str]:
    return [rule["message"] for rule in part.get("x-kubernetes-validations", ())]


def _is_fixing(sentence: str) -> bool:
    return "cannot change" in sentence


def _is_fixed(field: Schema) -> bool:
    return any(_is_fixing(sentence) for sentence in _sentences(field))


def _conditions(name: str) -> str:
    rows = (f"| {type_} | {meaning} |" for type_, meaning in CONDITIONS[name].items())
    words = "As Kubernetes' own conditions; [reasons](reasons.md) lists every reason."
    return "\n".join((f"### Conditions of {name}", words, "", "| type | when True |", "|---|---|", *rows, ""))


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check compare it; return 0 on success, 1 if it is stale."""
    return write_or_check("tools.api_docs", page, arguments)


if __name__ == "__main__":
    sys.exit(main())
