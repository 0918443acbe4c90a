"""The chart carries crds/ unchanged, and decides only whether they stay."""

import pytest
import yaml

from .conftest import CHART, ROOT, Document, Render

KEEP = {"helm.sh/resource-policy": "keep"}


def test_the_charts_copy_is_what_make_crds_wrote() -> None:
    ours = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}
    copied = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert copied == ours, "run `make crds`"


def definitions(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document["kind"] == "CustomResourceDefinition"]


@pytest.mark.parametrize(("keep", "annotations"), [("true", KEEP), ("false", None)])
def test_they_outlive_the_release_only_if_they_should(render: Render, keep: str, annotations: object) -> None:
    found = definitions(render("default", "--set", f"crds.keep={keep}", crds=True))
    assert [each["metadata"].get("annotations") for each in found] == [annotations] * 3


def test_the_rendered_ones_are_the_generated_ones_number_for_number(render: Render) -> None:
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    rendered = definitions(render("default", "--set", "crds.keep=false", crds=True))
    by_name = {document["metadata"]["name"]: document for document in rendered}
    assert by_name == {document["metadata"]["name"]: document for document in generated.values()}


def test_without_them_the_release_has_none(render: Render) -> None:
    assert definitions(render("default")) == []
