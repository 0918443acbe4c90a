"""What users touch: the `marlaas` command, the environment SDK and the local runner."""
