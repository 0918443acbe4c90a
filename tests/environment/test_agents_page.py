"""What docs/how-to/agents.md shows: its job is valid, its environments play and print what is shown, its links go somewhere."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from marlaas.cli.env import app
from marlaas.manifest import load
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.checks import check_supported

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agents.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [(text, shown) for (kind, text), (_, shown) in itertools.pairwise(BLOCKS) if kind == "bash"]


def squeezed(text: str) -> set[str]:
    """Lines without the columns' padding."""
    return {re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines()} - {""}


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_an_environment_prints_what_is_shown(command: str, shown: str, tmp_path, monkeypatch) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program, environment, *words = shlex.split(command)
    assert (program, environment) == ("marlaas", "env")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert squeezed(shown) <= squeezed(result.output)


def test_the_manifests_are_valid(tmp_path: Path) -> None:
    whole, roles = (text for kind, text in BLOCKS if kind == "yaml")
    (tmp_path / "shown.yaml").write_text(whole)
    (job,) = load([tmp_path / "shown.yaml"], runnable=False).jobs
    assert [agent.name for agent in job.spec.agents] == ["caller", "reader"]
    manifest = yaml.safe_load(whole)
    job = RLJob.model_validate(manifest | {"spec": manifest["spec"] | yaml.safe_load(roles)})
    assert list(check_supported(job)) == []
    assert [agent.policy_name for agent in job.spec.agents] == ["first"] * 3


def test_the_page_is_short_and_its_links_go_somewhere() -> None:
    links = {link for link in re.findall(r"\]\(([^)#\s]+)", TEXT) if "://" not in link}
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
    assert TEXT.count("\n") <= 280
