"""The sandbox role: a supervisor with the bus credential, and child processes that run environment code.

There are three kinds of process, each with fewer rights than the one before:
`service` (asyncio, bus, credential) → `forkserver` (imported the environment, forks, kills) → `child` (plays
one episode). In `marlaas run`, `parent` has imported the code of `service` once, and forks every supervisor; `template` has
imported that of `forkserver`, and forks every fork server.
"""
