"""The same bits twice: what a process must ask of MKL before its first computation, since MKL reads its settings once. Knows no torch.

Unless told not to, MKL picks its order of summation by the alignment of what it is given, and its number of threads as it goes (Intel, "Obtaining Numerically
Reproducible Results"). An adapter that was read from a file lies anywhere, so the same job could get other last bits in another process.
"""

import os

SETTINGS = {"MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}


def ask_for_the_same_bits() -> None:
    """Set this process up, and those that it starts. What the user has set stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
