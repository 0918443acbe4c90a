"""The chart carries crds/ unchanged, but for the mark that keeps them."""

import yaml

from .conftest import ROOT, Document, Render

KEEP = {"helm.sh/resource-policy": "keep"}


def definitions(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document["kind"] == "CustomResourceDefinition"]


def test_they_outlive_the_release(render: Render) -> None:
    found = definitions(render("default", crds=True))
    assert [each["metadata"].get("annotations") for each in found] == [KEEP] * 3


def test_the_rendered_ones_are_the_generated_ones_number_for_number(render: Render) -> None:
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    rendered = definitions(render("default", crds=True))
    by_name = {each["metadata"]["name"]: {**each, "metadata": {"name": each["metadata"]["name"]}} for each in rendered}
    assert by_name == {document["metadata"]["name"]: document for document in generated.values()}


def test_without_them_the_release_has_none(render: Render) -> None:
    assert definitions(render("default")) == []
