"""What the chart may tell the operator."""

import pytest
import yaml
from tests.operator.objects import PLAIN

from marlaas_api.errors import InvalidInput
from marlaas_operator.installation import load


@pytest.mark.parametrize(
    ("change", "words"),
    [({"natsURL": "x"}, "natsURL"), ({"logLevel": "LOUD"}, "logLevel"), ({"blobs": {}}, "blobs.url")],
)
def test_what_is_not_understood_is_refused_with_its_place(tmp_path, change, words):
    (tmp_path / "i.yaml").write_text(yaml.safe_dump({**PLAIN, **change}))
    with pytest.raises(InvalidInput, match=words):
        load(tmp_path / "i.yaml")


def test_a_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"i\.yaml"):
        load(tmp_path / "i.yaml")
    (tmp_path / "i.yaml").write_text("{")
    with pytest.raises(InvalidInput, match=r"i\.yaml"):
        load(tmp_path / "i.yaml")
