"""Run a program that a policy wrote: in a process of its own that can compute, print, and write small files, and nothing else.

`program` starts it, watches it and says how it ended; `child` is the process itself, which locks itself up (`privileges`, `landlock`,
`seccomp`) before the first line of the program runs. Layers that must be in force, or nothing runs: resource limits, no new privileges, no
capabilities, Landlock for files, an allow-list of system calls. Linux on x86_64 and aarch64 only, and all of it works for an unprivileged
process as well as for root. Everything here is the standard library, since the child starts without any other.
"""
