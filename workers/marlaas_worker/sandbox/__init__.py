"""The sandbox role: a supervisor that holds the bus, and child processes that run environment code and hold nothing.

Three kinds of process, each knowing less than the one before:
`service` (asyncio, bus, credential) → `forkserver` (imported the environment, forks, kills) → `child` (plays one episode).
"""
