import random
from pathlib import Path

from marlaas_worker.sandbox.rehearsal import rehearse


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_rehearsal_leaves_no_file_open_and_no_seed_behind():
    before, drawn = num_files(), []
    for _ in range(2):
        random.seed(1)
        rehearse()
        drawn.append(random.random())
    assert num_files() == before
    assert drawn[0] != drawn[1]
