"""Measurements. `python -m bench` takes all of them; `python -m bench NAME` one. Ratios are of two things run side by side in one run."""

import argparse


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a measurement, with its docstring as the help."""
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
