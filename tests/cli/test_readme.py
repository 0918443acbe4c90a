"""What the README shows works: its manifest, its environment, its commands, its pictures."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.cli.conftest import invoke
from typer.main import get_command

from marlaas.cli.app import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
POOL = {
    "apiVersion": "marlaas.dev/v1alpha1",
    "kind": "ModelPool",
    "metadata": {"name": "tiny"},
    "spec": {"model": {"builtin": "tiny"}, "adapterSlots": 4, "maxRank": 16, "rollout": {"kvCacheBytes": "64Mi"}},
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every `marlaas …` and `make …` that the README names, in code or in a sentence."""
    text = "\n".join([*blocks(""), *blocks("sh"), *re.findall(r"`([^`\n]+)`", README)])
    found = (re.sub(r"\s+#.*", "", line).removeprefix(".venv/bin/").strip() for line in text.splitlines())
    return sorted({line for line in found if line.startswith(("marlaas ", "make "))})


def test_its_job_is_valid(tmp_path: Path) -> None:
    manifests = blocks("yaml")
    assert manifests
    for number, manifest in enumerate(manifests):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(POOL) + "---\n" + manifest)
        result = invoke("validate", str(path))
        assert result.exit_code == 0, result.output


def test_its_environment_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    (tmp_path / "games.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    replies = [word for number in range(1, 21) for word in ("--reply", str(number))]
    result = invoke("env", "play", "games:guess", "--max-turns", "20", *replies)
    assert result.exit_code == 0, result.output
    assert "reward of policy" in result.output


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("marlaas ")])
def test_a_command_that_it_names_is_one(command: str) -> None:
    words = shlex.split(command)[1:]
    group = get_command(build(words))
    for word in words:
        if not hasattr(group, "commands"):
            break
        assert word in group.commands, command
        group = group.commands[word]
    options = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.split("=")[0] for word in re.findall(r"(?<=\s)\[?(--?[a-z][a-z-]*)", command)}
    assert used <= options | {"--help"}, command


def test_a_make_target_that_it_names_is_one() -> None:
    makefiles = "\n".join((ROOT / name).read_text() for name in ("Makefile", "e2e/e2e.mk"))
    targets = set(re.findall(r"^([a-z0-9-]+):", makefiles, re.MULTILINE))
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named
    assert named <= targets


def test_its_pictures_and_pages_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
