"""The pages of the tree, their blocks, and their commands, which are parsed by the programs that they name.

The language of a block says how it is tested:
- `bash`: its commands are run in this process, in a folder of the page; the `text` block below it is what they print
- `sh`: each command is parsed by the program that it names (`check`)
- `console`: lines that begin with `$` are parsed in the same way; the rest is an example of an answer
- `python`: it is run; a first line `# NAME.py` also writes it into the page's folder
- `yaml`: a manifest, or a piece of an RLJob, which is validated
- `dockerfile`: what it copies is a file of the page
- `json`: a file of the page; a block of any language with `title="NAME"` is written into the page's folder
- `text`: output of the `bash` block above it, or a picture
"""

import importlib.util
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from bench.__main__ import NAMES as MEASUREMENTS
from tools.crd import PRESENTATIONS
from typer.main import get_command

from marlaas.cli.app import build
from marlaas_api.subjects import STREAMS
from marlaas_e2e import binaries
from marlaas_worker.sandbox.seclusion import ENVIRONMENT_PREFIX

ROOT = Path(__file__).parents[2]
OWN = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "e2e/README.md", ROOT / "bench/gpu/README.md")
LANGUAGES = ("bash", "sh", "console", "python", "yaml", "dockerfile", "json", "text")
_FENCE = re.compile(r"^```(\w*)(?: title=\"([\w.-]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"`((?:marlaas|kubectl|helm|make|pytest|nats|docker|python -m) [^`\n]+)`")


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    file: str
    text: str


@cache
def pages():
    """The pages that users read: README and the like, and docs/."""
    return (*OWN, *sorted((ROOT / "docs").rglob("*.md")))


@cache
def blocks():
    return tuple(Block(page, *found) for page in pages() for found in _FENCE.findall(page.read_text("utf-8")))


def commands():
    for block in blocks():
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language in ("bash", "sh"):
            yield from filter(None, (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines))
        elif block.language == "console":
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    for page in pages():
        yield from _COMMAND.findall(without_blocks(page.read_text("utf-8")))


def without_blocks(text):
    return _FENCE.sub("", text)


def name(page):
    return page.relative_to(ROOT).as_posix()


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


CLUSTER_PROGRAMS = ("kubectl", "helm")
_MAKEFILES = "\n".join((ROOT / name).read_text("utf-8") for name in ("Makefile", "e2e/e2e.mk"))
_VALUES = yaml.safe_load((ROOT / "charts/marlaas/values.yaml").read_text("utf-8"))
_PATH = re.compile(r"(?:examples|images|charts|docs|tests|e2e|tools|bench)/[\w./*-]*\w")


def simple(line):
    """Split a line into commands; assignments before a program are left out after a look at their names."""
    found = []
    for part in re.split(r"&&|;|(?<!\\)\|(?!\|)", re.sub(r"\s>\s*\S+$", "", line)):
        words = shlex.split(part.replace("…", "x"))
        while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
            assert _is_read(words[0].partition("=")[0]), f"no code reads {words[0]}"
            words.pop(0)
        if words:
            found.append(words)
    return found


def program(words):
    return "marlaas" if list(words[:2]) == ["kubectl", "marlaas"] else words[0]


def check(words):
    """Raise AssertionError if the command is none, or names a file that is not there."""
    for path in (path for word in words for path in _PATH.findall(word) if "://" not in word and "/x" not in word):
        assert any(ROOT.glob(path)), f"no file {path}"
    CHECKS[program(words)](list(words))


def _is_read(variable):
    if variable.startswith(ENVIRONMENT_PREFIX):  # any variable, for an environment of the user's own
        return True
    sources = (path for folder in ("e2e", "workers", "tests") for path in (ROOT / folder).rglob("*.py"))
    return variable in _MAKEFILES or any(f'"{variable}"' in path.read_text("utf-8") for path in sources)


def _marlaas(words):
    rest = ["1" if word in ("N", "MIB") else word for word in words[2 if words[0] == "kubectl" else 1 :]]
    command: Any = get_command(build(rest))
    while commands := getattr(command, "commands", None):
        if not rest or rest[0] == "--help":
            return
        assert rest[0] in commands, f"no command {rest[0]}"
        command = commands[rest.pop(0)]
    if rest and "--help" not in rest:  # a command without anything is named in a sentence
        command.make_context(words[-1], rest)


def _make(words):
    for word in words[1:]:
        if "=" in word:
            assert re.search(rf"\b{word.partition('=')[0]}\b", _MAKEFILES), f"no variable {word}"
        else:
            assert re.search(rf"^{word.rstrip(',')}:", _MAKEFILES, re.MULTILINE), f"no target {word}"


def _python(words):
    assert words[1] == "-m", words
    module, *rest = words[2:]
    assert module == "pytest" or importlib.util.find_spec(module), f"no module {module}"
    if module == "bench" and rest:
        names = [word for word in rest if not word.startswith("-")]
        assert names[0] in (*MEASUREMENTS, "NAME"), f"no measurement {names[0]}"
        source = "".join(path.read_text("utf-8") for path in (ROOT / "bench").glob(f"{names[0]}*.py"))
    elif module.startswith("bench.gpu"):
        source = "".join(path.read_text("utf-8") for path in (ROOT / "bench/gpu").glob("*.py"))
    else:
        source = _source(module)
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        assert f'"{option}"' in source, f"no option {option}"
    if module == "pytest":
        _pytest(words[2:])


def _source(module):
    spec = importlib.util.find_spec(module)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [path for folder in folders for path in folder.glob("*.py")] or [Path(str(spec.origin))]
    return "".join(path.read_text("utf-8") for path in paths)


def _pytest(words):
    markers = re.findall(r'"(\w+): ', (ROOT / "pyproject.toml").read_text("utf-8"))
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option == "-m":
            assert set(re.findall(r"\w+", value)) - {"not", "and", "or"} <= {*markers, "hypothesis"}, value


def _kubectl(words):
    if words[1:2] == ["explain"]:
        _field(words[2] if len(words) > 2 else "rljob")
        return
    named = [word for word in words if re.fullmatch(r"(deployment|statefulset)/marlaas-\w+", word)]
    assert all(f"name: {word.partition('/')[2]}\n" in _golden() for word in named), named
    _asked(words)


def _field(path):
    kind, *fields = path.split(".")
    shown = next(shown for shown in PRESENTATIONS.values() if kind in (shown.plural, shown.plural[:-1]))
    crd = yaml.safe_load((ROOT / f"crds/marlaas.dev_{shown.plural}.yaml").read_text("utf-8"))
    part: Any = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for field in fields:
        part = part.get("items", part)["properties"][field]


@cache
def _golden():
    return "".join(path.read_text("utf-8") for path in (ROOT / "tests/chart/golden").rglob("*.yaml"))


def _helm(words):
    for option, given in itertools.pairwise(words):
        if option in ("--set", "--set-json"):
            key, _, value = given.partition("=")
            assert _is_value(key), f"the chart has no value {key}"
            if option == "--set-json":
                json.loads(value)
    _asked(words)


def _is_value(key):
    value: Any = _VALUES
    for step in key.split("."):
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


def _asked(words):
    """Ask the real program whether it has this command with these options."""
    path = binaries.ensure([words[0]])[words[0]]
    done = subprocess.run([path, *words[1:], "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout, f"{words[0]} has no command {words[1]}"


def _docker(words):
    for option, value in itertools.pairwise(words):
        if option == "-f":
            recipe = (ROOT / value).read_text("utf-8")
            given = [word.partition("=")[0] for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
            assert all(f"ARG {name}" in recipe for name in given), given
    assert words[1] in ("build", "push")


def _taken(words):
    """A command of the shell or of a usual program, which has nothing of ours to check."""
    assert len(words) > 1, words


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "marlaas": _marlaas,
    "make": _make,
    "python": _python,
    "pytest": lambda words: _pytest(words[1:]),
    "kubectl": _kubectl,
    "helm": _helm,
    "docker": _docker,
    "nats": lambda words: {stream.name: stream for stream in STREAMS}[words[words.index("stream") + 2]],
    **dict.fromkeys(("cd", "echo", "export", "jq"), _taken),
}
