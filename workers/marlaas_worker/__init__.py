"""Data plane: the roles orchestrator, rollout, sandbox, trainer and exporter, and `rl`, the loss mathematics.

Roles never import each other.
"""
