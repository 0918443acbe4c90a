"""The control plane of this package's tests is one of its own: they kill it."""

from marlaas_e2e.fixtures import control_plane

__all__ = ["control_plane"]
