"""Data plane: the roles orchestrator, rollout, sandbox and trainer, and `rl`, their mathematics. Roles never import each other."""
