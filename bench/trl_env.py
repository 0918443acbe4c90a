"""TRL in its own environment in the user's cache folder: its pinned versions differ from ours, and `.venv` is not changed."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.sources import python_path
from marlaas.models.cache import cache_folder

REQUIREMENTS = Path(__file__).parent / "trl_requirements.txt"


def trl_python() -> Path:
    """Return the environment's interpreter; build the environment if it is missing or its requirements changed (a minute, 5 GB)."""
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


def process_variables(threads: int) -> dict[str, str]:
    """Return the environment variables of a measured process.

    They set the number of threads, disable the network, and add our sources to the path, so that no installation is needed.
    """
    return os.environ | {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
