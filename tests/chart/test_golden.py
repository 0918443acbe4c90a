"""What each set of values renders to, as files to read in a review; and the chart carries crds/ unchanged, but for the mark that keeps them.

`MARLAAS_WRITE_GOLDEN=1 pytest tests/chart/test_golden.py` writes them anew. golden/default.yaml has every object; the others have what differs from it.
"""

import os
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT, Document, value_sets

GOLDEN = Path(__file__).parent / "golden"
KEEP = {"helm.sh/resource-policy": "keep"}


class _Dumper(yaml.SafeDumper):
    """Text of several lines is written as such, to be read."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_block)


def name(document: Document) -> str:
    metadata = document["metadata"]
    return f"{document['kind']} {metadata['name']}"


def text(documents: list[Document], absent: list[str]) -> str:
    ordered = sorted(documents, key=name)
    header = "".join(f"# absent: {each}\n" for each in absent)
    return header + yaml.dump_all(ordered, Dumper=_Dumper, sort_keys=False, width=140, explicit_start=True)


@pytest.mark.parametrize("values", value_sets())
def test_a_set_of_values_renders_to_its_golden_file(render, values):
    usual = {name(document): document for document in render("default")}
    these = {name(document): document for document in render(values)}
    if values == "default":
        rendered = text(list(these.values()), [])
    else:
        different = [document for key, document in these.items() if usual.get(key) != document]
        rendered = text(different, sorted(usual.keys() - these.keys()))
    golden = GOLDEN / f"{values}.yaml"
    if os.environ.get("MARLAAS_WRITE_GOLDEN"):
        golden.write_text(rendered)
    assert rendered == golden.read_text(), f"if that is meant: MARLAAS_WRITE_GOLDEN=1 pytest {Path(__file__).name}"


def test_every_golden_file_has_its_values():
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == value_sets()


def definitions(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document["kind"] == "CustomResourceDefinition"]


def test_the_rendered_ones_are_the_generated_ones_number_for_number(render):
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    rendered = definitions(render("default", crds=True))
    assert [each["metadata"]["annotations"] for each in rendered] == [KEEP] * 3
    expected = {document["metadata"]["name"]: document for document in generated.values()}
    assert {(name := each["metadata"]["name"]): each | {"metadata": {"name": name}} for each in rendered} == expected
