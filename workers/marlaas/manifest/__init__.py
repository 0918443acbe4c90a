"""Loads manifests: YAML files to kinds, cross-checked, every error with its file and line."""

from marlaas.manifest.findings import Finding, InvalidManifest
from marlaas.manifest.loading import LoadedManifest, load

__all__ = ["Finding", "InvalidManifest", "LoadedManifest", "load"]
