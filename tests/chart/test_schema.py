"""values.schema.json: what a typing error in values gets to read. Read as documentation: setting, then where and why it is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import CHART, VALUES

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.mark.parametrize("case", REFUSED, ids=[case["set"] for case in REFUSED])
def test_a_value_that_cannot_be_meant_is_refused(helm, case):
    done = helm("template", "marlaas", CHART, "--set", case["set"])
    assert done.returncode != 0
    assert case["says"] in done.stderr


def test_a_release_name_that_makes_labels_too_long_is_refused(helm):
    assert helm("template", "m" * 40, CHART).returncode == 0
    assert "longer than 40 characters" in helm("template", "m" * 41, CHART).stderr


@pytest.mark.parametrize("values", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_lint_finds_nothing(helm, values):
    done = helm("lint", "--strict", CHART, "--values", VALUES / f"{values}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_and_the_values_name_the_same_things():
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert names_of_schema(schema) - {".global"} == names_of_values(values, schema)


def names_of_schema(schema: dict[str, Any], name: str = "") -> set[str]:
    """Names of the schema's leaves, from the top."""
    if "properties" not in schema:
        return {name}
    return set().union(*(names_of_schema(below, f"{name}.{key}") for key, below in schema["properties"].items()))


def names_of_values(value: Any, schema: dict[str, Any], name: str = "") -> set[str]:
    """Names of the values as deep as the schema names them."""
    if not isinstance(value, dict) or "properties" not in schema:
        return {name}
    named = schema["properties"]
    return set().union(*(names_of_values(below, named.get(key, {}), f"{name}.{key}") for key, below in value.items()))
