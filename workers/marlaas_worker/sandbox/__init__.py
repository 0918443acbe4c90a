"""The sandbox role: a supervisor with the bus credential, and child processes that run environment code.

There are three kinds of process, each with fewer rights than the one before: `service` (asyncio, bus, credential) →
`forkserver` (has imported the environment; forks and kills children) → `child` (plays one episode). In `marlaas run`,
`host` runs `service` once for each sandbox, in one process; each has a fork server of its own.
"""
