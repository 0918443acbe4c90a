"""Data plane: the roles orchestrator, rollout, sandbox and trainer, and `rl`, the loss mathematics.

Roles never import each other.
"""
