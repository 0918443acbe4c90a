"""The trainer role: one base model, the adapters of many agents, one commit per step."""
