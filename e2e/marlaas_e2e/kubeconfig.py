"""Kubeconfig files, written as JSON (which is YAML)."""

import base64
import json
from pathlib import Path

from marlaas_e2e.certificates import KeyPair


def write_kubeconfig(target: Path, url: str, authority: Path, client: KeyPair) -> Path:
    """One context `e2e` for the server at `url`; certificates are embedded, so the file can be copied anywhere."""
    user = {"client-certificate-data": _encoded(client.certificate), "client-key-data": _encoded(client.key)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": url, "certificate-authority-data": _encoded(authority)}}],
        "users": [{"name": "e2e", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        "current-context": "e2e",
    }
    target.write_text(json.dumps(content, indent=1))
    target.chmod(0o600)
    return target


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
