"""Decisions, one a file: what was observed (`snapshot`) to what is to be done (`plan`). No client, no asyncio, no clock."""
