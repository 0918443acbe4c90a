"""The trainer role: one base model, many agents' adapters, one commit per step."""
