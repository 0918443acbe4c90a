"""The same bits twice: what a process must ask of MKL before its first computation, since MKL reads its settings once. Knows no torch.

Unless told not to, MKL picks its order of summation by the alignment of what it is given, which differs from run to run, and its number of threads
as it goes (Intel, "Obtaining Numerically Reproducible Results"). Found the hard way: one process in a thousand tests had other last bits.
"""

import os

SETTINGS = {"MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}


def ask_for_the_same_bits() -> None:
    """Set this process up, and those that it starts. What the user has set stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
