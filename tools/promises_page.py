"""Generator of docs/reference/promises.md from tools/promises.toml; with --check, compare the file with it.

A guarantee that names a missing file or test is an error that says where the test is now, if another file has it.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tools.api_docs import MAX_CELL, write_or_check

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tools" / "promises.toml"
_PREFACE = """# Guarantees

Generated from `tools/promises.toml` by `make crds`; do not edit.

What MARLaaS guarantees, where it is made true, and the tests that check it.
Run one with `pytest FILE -k NAME`. `tests/loop` runs all roles; `tests/crds`, `tests/chart` and `tests/operator/real` use a real API server; `e2e/tests` a whole cluster (`make e2e`).

| guarantee | in one sentence | test |
|---|---|---|
"""


class Promise(BaseModel):
    """One guarantee. See the head of promises.toml for the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: Annotated[str, Field(min_length=1, max_length=40)]
    guarantee: Annotated[str, Field(min_length=1, max_length=MAX_CELL)]
    made: Annotated[tuple[str, ...], Field(min_length=1)]
    proof: Annotated[tuple[str, ...], Field(min_length=1)]
    whole: tuple[str, ...] = ()
    about: str = ""


def promises() -> list[Promise]:
    """Return the guarantees in the order of the source."""
    return [Promise.model_validate(entry) for entry in tomllib.loads(SOURCE.read_text(encoding="utf-8"))["promise"]]


def missing() -> Iterator[str]:
    """Yield a message for every file and test that a guarantee names and the tree lacks."""
    for promise in promises():
        yield from (f"{promise.id}: no file {path}" for path in promise.made if not (ROOT / path).is_file())
        for test in (*promise.proof, *promise.whole):
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or (name and not _defines(ROOT / path, name)):
                yield f"{promise.id}: no test {test}{_elsewhere(name)}"


def _defines(path: Path, name: str) -> bool:
    return re.search(rf"^(async )?def {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _elsewhere(name: str) -> str:
    """Return where a test of this name is now, or nothing."""
    folders = ("tests", "e2e/tests") if name else ()
    found = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py") if _defines(path, name)]
    return f"; it is in {', '.join(path.relative_to(ROOT).as_posix() for path in found)}" if found else ""


def page() -> str:
    """Return the whole page: the index, and a section for each guarantee."""
    found = promises()
    index = "".join(f"| [{each.title}](#{each.id}) | {each.guarantee} | {_file(each.proof[0])} |\n" for each in found)
    return _PREFACE + index + "".join(_section(promise) for promise in found)


def _file(test: str) -> str:
    path = test.partition("::")[0]
    return f"[`{path}`](../../{path})"


def _section(promise: Promise) -> str:
    about = f"{promise.about.strip()}\n\n" if promise.about else ""
    lists = [("Made in", promise.made), ("Tests", promise.proof), ("Shown whole by", promise.whole)]
    body = "\n".join(f"{title}:\n\n{_items(entries)}" for title, entries in lists if entries)
    return f'\n<a id="{promise.id}"></a>\n\n## {promise.title}\n\n{promise.guarantee}\n\n{about}{body}'


def _items(entries: tuple[str, ...]) -> str:
    return "".join(f"- {_file(entry)}{_name(entry)}\n" for entry in entries)


def _name(entry: str) -> str:
    name = entry.partition("::")[2]
    return f", `{name}`" if name else ""


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check compare it; return 0 on success, 1 if it is stale or names what is missing."""
    for message in (problems := list(missing())):
        sys.stderr.write(f"tools/promises.toml: {message}\n")
    return write_or_check("tools.promises_page", page, arguments) or int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
