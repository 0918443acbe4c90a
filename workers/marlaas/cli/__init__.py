"""The `marlaas` command: parses the command line, reports errors as sentences, and sets the exit code.

Exit codes: 0 success, 1 failure, 2 the input must be changed first, 130 stopped by Ctrl-C.
"""

from marlaas.cli.app import main, plugin

__all__ = ["main", "plugin"]
