"""Talking to a cluster as the person at the keyboard: through their own kubectl, so that every way to log in works."""
