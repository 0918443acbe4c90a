"""The pages of the tree and their blocks.

The language of a block says how it is tested:
- `bash`: its commands are run in this process, in a folder of the page; the `text` block below it is what they print
- `sh`: each command is parsed by the program that it names (tests/docs/commands.py)
- `console`: lines that begin with `$` are parsed in the same way; the rest is an example of an answer
- `python`: it is run; a first line `# NAME.py` also writes it into the page's folder
- `yaml`: a manifest, or a piece of an RLJob, which is validated
- `dockerfile`: what it copies is a file of the page
- `text`: output of the `bash` block above it, or a picture
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "e2e/README.md", ROOT / "bench/gpu/README.md")
LANGUAGES = ("bash", "sh", "console", "python", "yaml", "dockerfile", "text")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"`((?:marlaas|kubectl|helm|make|pytest|nats|docker|python -m) [^`\n]+)`")


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str


@cache
def pages() -> tuple[Path, ...]:
    """The pages that users read: README and the like, and docs/."""
    return (*OWN, *sorted((ROOT / "docs").rglob("*.md")))


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(Block(page, *found) for page in pages() for found in _FENCE.findall(page.read_text("utf-8")))


def commands() -> Iterator[str]:
    """Every command of a block, and of a sentence or a table."""
    for block in blocks():
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language in ("bash", "sh"):
            yield from (line for line in map(_without_comment, lines) if line)
        elif block.language == "console":
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    for page in pages():
        yield from _COMMAND.findall(without_blocks(page.read_text("utf-8")))


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#\s.*$", "", line).strip()


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
