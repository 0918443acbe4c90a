"""Policies, one per file: from a snapshot to a plan. No client, no asyncio, no clock."""
