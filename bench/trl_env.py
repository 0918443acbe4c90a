"""TRL in an environment of its own, in the user's cache folder: its pins are not ours, and `.venv` stays as it is."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from marlaas.models.cache import cache_folder

REQUIREMENTS = Path(__file__).parent / "trl_requirements.txt"
ROOT = Path(__file__).parent.parent


def trl_python() -> Path:
    """The environment's interpreter; built when it is not there or its requirements have changed (a minute, 5 GB)."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache_folder() / f"bench-trl-{digest}"
    done = folder / ".complete"
    if not done.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        uv = shutil.which("uv") or str(cache_folder() / "uv" / "bin" / "uv")
        python = str(folder / "bin" / "python")
        print(f"building {folder}", file=sys.stderr, flush=True)
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "-r", str(REQUIREMENTS)], check=True)
        done.touch()
    return folder / "bin" / "python"


def surroundings(threads: int) -> dict[str, str]:
    """Environment variables of a measured process: so many threads, no network, and our sources, which need no installation."""
    paths = [str(ROOT / room) for room in ("operator", "workers")] + [str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
