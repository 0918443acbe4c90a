"""The `marlaas` command: words on a command line to calls, and failures to sentences and exit codes.

Exit codes: 0 all is well, 1 it failed, 2 what was written must be changed first, 130 stopped by Ctrl-C.
"""

from marlaas.cli.app import main, plugin

__all__ = ["main", "plugin"]
