"""Run a program that a policy wrote in a restricted process: it can compute, print and write small files, nothing else.

`program` starts the process, watches it and reports how it ended. `child` is the process itself: it restricts
itself (`privileges`, `seccomp`) before the first line of the program runs. Required layers, without
which nothing runs: resource limits, no new privileges, no capabilities, Landlock for files, an allow-list of system
calls. Linux on x86_64 and aarch64 only. All layers work for an unprivileged process as well as for root. Standard
library only, because the child starts without other packages.
"""
