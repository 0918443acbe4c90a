"""Source trees: the state of one, by which kept results are known, and worktrees of other commits."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "marlaas" / "bench"
PACKAGES = ("operator", "workers")
LOCK = Path("locks") / "cpu.txt"


@dataclass(frozen=True, slots=True)
class Sources:
    """State of a tree. commit: HEAD, with ` and changes` if the sources differ from it. digest: of the sources themselves."""

    commit: str
    digest: str


def sources(tree: Path = ROOT) -> Sources:
    """Return the state of a tree: the files of its packages and its lock. Other files do not change the results of a run."""
    digest = hashlib.sha256()
    for path in _files(tree):
        digest.update(f"{path.relative_to(tree)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return Sources(_commit(tree), digest.hexdigest())


def _files(tree: Path) -> list[Path]:
    found = [path for package in PACKAGES for path in (tree / package).rglob("*") if path.is_file()]
    return sorted([*(path for path in found if "__pycache__" not in path.parts), tree / LOCK])


def _commit(tree: Path) -> str:
    commit = _git(tree, "rev-parse", "--short", "HEAD")
    changed = commit and _git(tree, "status", "--porcelain", "--", *PACKAGES, str(LOCK))
    return f"{commit or 'unknown'}{' and changes' if changed else ''}"


def _git(tree: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()


def digest_of(values: object) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def python(tree: Path = ROOT) -> str:
    """Return the interpreter for the code of a tree."""
    return sys.executable if tree == ROOT else str(tree / ".venv" / "bin" / "python")


def python_path(tree: Path = ROOT, *first: Path) -> str:
    """Return a PYTHONPATH with which processes run the code of a tree, wherever their environment was installed from."""
    return os.pathsep.join(map(str, [*first, *(tree / package for package in PACKAGES), tree]))


def worktree(commit: str) -> Path:
    """Return a checkout of a commit in the cache, made on first use.

    It shares this tree's environment if its lock is the same, else it has its own (5 GB). Use it with `python_path`.
    """
    folder = CACHE / commit
    if not (folder / ".venv").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
        own = (ROOT / ".venv").resolve()
        if own.exists() and (folder / LOCK).read_bytes() == (ROOT / LOCK).read_bytes():
            (folder / ".venv").symlink_to(own)
        else:
            subprocess.run(["make", "setup"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    print(worktree(sys.argv[1]))
