"""MKL settings for bitwise reproducible results. Set them before the first computation: MKL reads them once. Does not import torch.

By default, MKL chooses its order of summation by the alignment of its operands, and changes its number of
threads at run time (Intel, "Obtaining Numerically Reproducible Results"). Tensors read from a file have
arbitrary alignment, so the same job could differ in the last bits between processes.
"""

import os

SETTINGS = {"MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}


def ask_for_the_same_bits() -> None:
    """Set the environment for this process and its children; keep values that the user has set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
