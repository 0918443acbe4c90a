"""Measurements.

`python -m bench` runs all of them; `python -m bench NAME` one. A ratio compares two things measured side by side
in one run.
"""

import argparse


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser for a measurement's options, with the measurement's docstring as the help."""
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
