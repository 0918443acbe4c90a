"""Builders of desired Kubernetes objects, as server-side apply wants them. No client, no asyncio, no clock."""
