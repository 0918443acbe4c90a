"""Generator of CustomResourceDefinitions from the kinds: `python -m tools.crd [--check] DIRECTORY`.

It converts pydantic's JSON schema to a structural schema of `apiextensions.k8s.io/v1`: references are written out, an
optional field may be absent (no `null`), and every nested object has a default, so that the API server fills in the
same defaults as the workers. Rules of the kinds (CEL, list keys, free-form objects) are defined next to the fields in
`marlaas_api.kinds`.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marlaas_api.kinds import GROUP, KINDS, VERSION, Kind
from tools.structural import kind_schema

Schema = dict[str, Any]


def explained(schema: Schema) -> Schema:
    """Return the schema with each default value appended to its field's description; empty objects are left out."""
    told = dict(schema)
    if "properties" in told:
        told["properties"] = {name: explained(part) for name, part in told["properties"].items()}
    for inside in ("items", "additionalProperties"):
        if isinstance(told.get(inside), dict):
            told[inside] = explained(told[inside])
    if told.get("default", {}) != {}:
        told["description"] = f"{told['description'].rstrip()} Default: {value_text(told['default'])}."
    return told


def value_text(value: object) -> str:
    """Format a value as YAML writes it on one line; large numbers have spaces between thousands."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    return number_text(value) if isinstance(value, int | float) else str(value)


def number_text(value: float) -> str:
    """Format a number for people: no `.0`, and spaces between thousands from 10 000 on."""
    return (
        f"{int(value):,}".replace(",", " ") if float(value).is_integer() and abs(value) >= 10_000 else f"{value:.16g}"
    )


_HEADER = "# Generated from marlaas_api.kinds by `make crds`; do not edit.\n"
_MAX_BYTES = 256 * 1024
"""Largest size of an annotation: kubectl apply stores the whole object in one."""

_AGE = ("Age", "date", ".metadata.creationTimestamp", 0)


@dataclass(frozen=True, slots=True)
class Presentation:
    """Names and table columns of a kind in kubectl.

    columns: (heading, type, JSON path, priority); those with priority above 0 are shown by `-o wide`.
    """

    plural: str
    scope: str
    short_names: tuple[str, ...]
    columns: tuple[tuple[str, str, str, int], ...] = field(default=())


PRESENTATIONS = {
    "RLJob": Presentation(
        "rljobs",
        "Namespaced",
        ("rlj",),
        (
            ("Pool", "string", ".spec.poolRef.name", 0),
            ("Phase", "string", ".status.phase", 0),
            ("Step", "string", ".status.progress", 0),
            ("Reward", "number", ".status.reward", 0),
            ("Version", "string", ".status.versions", 0),
            ("Reason", "string", ".status.reason", 0),
            _AGE,
            ("Staleness", "number", ".status.staleness", 1),
            ("Tokens/s", "number", ".status.tokensPerSecond", 1),
            ("Tenant", "string", ".status.tenant", 1),
            ("Eval", "number", ".status.evalLast", 1),
            ("Generated", "integer", ".status.usage.generatedTokens", 1),
            ("Trained", "integer", ".status.usage.trainedTokens", 1),
            ("Wasted", "integer", ".status.usage.wastedTokens", 1),
        ),
    ),
    "ModelPool": Presentation(
        "modelpools",
        "Cluster",
        ("mp",),
        (
            ("Model", "string", ".status.model", 0),
            ("Rollout", "string", ".status.rolloutReady", 0),
            ("Trainer", "string", ".status.trainerReady", 0),
            ("Agents", "string", ".status.slots", 0),
            ("Jobs", "integer", ".status.jobs", 0),
            _AGE,
        ),
    ),
    "Tenant": Presentation(
        "tenants",
        "Cluster",
        ("tnt",),
        (
            ("Weight", "number", ".spec.weight", 0),
            ("Entitled", "number", ".status.shareEntitled", 0),
            ("Held", "number", ".status.shareHeld", 0),
            ("Jobs", "integer", ".status.jobs", 0),
            ("Queued", "integer", ".status.queued", 0),
            ("Agents", "integer", ".status.adapterSlots", 0),
            ("Generated", "integer", ".status.usage.generatedTokens", 0),
            ("Trained", "integer", ".status.usage.trainedTokens", 0),
            _AGE,
            ("Wasted", "integer", ".status.usage.wastedTokens", 1),
            ("Engine-s", "number", ".status.usage.engineSeconds", 1),
            ("Trainer-s", "number", ".status.usage.trainerSeconds", 1),
        ),
    ),
}


def definition(kind: type[Kind]) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
    name, shown = kind.__name__, PRESENTATIONS[kind.__name__]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{shown.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": name,
                "listKind": f"{name}List",
                "plural": shown.plural,
                "singular": name.lower(),
                "shortNames": list(shown.short_names),
                "categories": ["marlaas"],
            },
            "scope": shown.scope,
            "versions": [_version(kind, shown)],
        },
    }


def _version(kind: type[Kind], shown: Presentation) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(*column) for column in shown.columns],
        "schema": {"openAPIV3Schema": explained(kind_schema(kind))},
    }


def _column(heading: str, column_type: str, path: str, priority: int) -> dict[str, Any]:
    column = {"name": heading, "type": column_type, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def files() -> dict[str, str]:
    """Return the content of each file by file name; the same kinds give the same bytes."""
    return {f"{GROUP}_{PRESENTATIONS[kind.__name__].plural}.yaml": _text(definition(kind)) for kind in KINDS}


class _Dumper(yaml.SafeDumper):
    """YAML dumper that repeats equal parts instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(body: dict[str, Any]) -> str:
    text = _HEADER + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    if len(text.encode()) >= _MAX_BYTES:
        raise ValueError(f"{body['metadata']['name']} is larger than {_MAX_BYTES} bytes")
    return text


def stale(directory: Path) -> list[str]:
    """Return the names of files in the directory that are missing, out of date, or belong to no kind."""
    expected = files()
    there = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.yaml")}
    return sorted(name for name in expected.keys() | there.keys() if expected.get(name) != there.get(name))


def write(directory: Path) -> None:
    """Write the generated files into the directory and remove other YAML files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in stale(directory):
        (directory / name).unlink(missing_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write the definitions, or with --check compare them; return 0 on success, 1 if files are stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.crd", description="Generate crds/ from the kinds.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.directory)
        return 0
    names = stale(options.directory)
    for name in names:
        sys.stderr.write(f"{options.directory / name} is not what marlaas_api.kinds gives: run `make crds`\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
