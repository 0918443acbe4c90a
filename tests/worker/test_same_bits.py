"""A role asks for the same bits before anything can compute."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from marlaas_worker.__main__ import main
assert "torch" not in sys.modules, "MKL would have read its settings before they are made"
from marlaas_worker.same_bits import ask_for_the_same_bits
import os
ask_for_the_same_bits()
print(os.environ["MKL_CBWR"], os.environ["MKL_DYNAMIC"])
"""


def asked(**variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_role_asks_before_anything_that_computes_is_imported() -> None:
    assert asked() == "AUTO,STRICT FALSE"


def test_what_the_user_has_set_stays() -> None:
    assert asked(MKL_CBWR="AVX2") == "AVX2 FALSE"
