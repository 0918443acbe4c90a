"""The rollout role: renders and tokenizes prompts, generates with proven adapter versions, and records every turn."""
