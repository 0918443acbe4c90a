"""Builders of desired Kubernetes objects for server-side apply. No client, no asyncio, no clock."""
