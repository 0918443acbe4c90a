"""`marlaas run`: an RLJob on one machine. Pure: documents, plan, restarts, eta, table, results, last_words; the rest is the shell.

The runner knows nothing of models, tokens or gradients: it starts roles as processes around an embedded NATS server, reads
`progress` and `replicas`, and shows and writes what it read.
"""
