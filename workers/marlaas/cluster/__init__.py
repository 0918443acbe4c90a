"""Access to a cluster through the user's own kubectl, so that every way to log in works."""
