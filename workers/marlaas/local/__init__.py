"""`marlaas run`: RLJobs on one machine. Pure modules: documents, plan, table.

The runner does not handle models, tokens or gradients. It starts roles as processes around an embedded NATS server,
reads `progress` and `replicas`, and displays and writes what it read.
"""
