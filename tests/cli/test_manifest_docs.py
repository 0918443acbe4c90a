"""What docs/models.md and docs/data-order.md show is right, and what they list is whole."""

import re
from pathlib import Path

import pytest

from marlaas.manifest import load
from marlaas.models.architectures import ADAPTABLE

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["models.md", "data-order.md"])
def test_every_manifest_shown_is_right(name: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
        manifest = load([tmp_path / "shown.yaml"], runnable=False)
        assert manifest.pools or manifest.jobs


def test_every_architecture_is_listed() -> None:
    listed = (DOCS / "models.md").read_text(encoding="utf-8").rpartition("## Architectures")[2]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", listed)) == ADAPTABLE
