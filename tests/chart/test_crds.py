"""The chart carries crds/ unchanged, but for the mark that keeps them."""

import yaml

from .conftest import ROOT, Document

KEEP = {"helm.sh/resource-policy": "keep"}


def definitions(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document["kind"] == "CustomResourceDefinition"]


def test_the_rendered_ones_are_the_generated_ones_number_for_number(render):
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    rendered = definitions(render("default", crds=True))
    assert [each["metadata"]["annotations"] for each in rendered] == [KEEP] * 3
    expected = {document["metadata"]["name"]: document for document in generated.values()}
    assert {(name := each["metadata"]["name"]): each | {"metadata": {"name": name}} for each in rendered} == expected
