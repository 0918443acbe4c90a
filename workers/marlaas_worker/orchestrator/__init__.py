"""The orchestrator role: admission, credits, the experience store, steps and evaluation. CPU only; one active, by lease."""
