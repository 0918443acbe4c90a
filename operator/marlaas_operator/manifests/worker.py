"""Command and environment of a worker process in a pod.

`marlaas run` uses the same command (`marlaas.local.processes`).
"""

from marlaas_operator.installation import Installation
from marlaas_operator.manifests import pods
from marlaas_operator.manifests.pods import Volume

PYTHON = ("python3", "-P", "-s", "-m")
"""-P: do not import from the image's working folder. -s: nor from below HOME, which a sandbox shares with
environment code and which outlives a container: a `usercustomize` left there would run in the next supervisor.
"""


def worker_command(role: str, nats_url: str, blobs_url: str) -> list[str]:
    """Return the command of a role; the caller appends its document's file. The replica's name is the pod's."""
    return [
        *(*PYTHON, "marlaas_worker", role),
        *("--nats", nats_url, "--blobs", blobs_url),
        *("--name", "$(POD_NAME)", "--scratch", pods.SCRATCH),
        *("--creds", f"{pods.BUS_FOLDER}/{pods.CREDENTIAL}", "--health", str(pods.HEALTH_PORT)),
    ]


def packages_volumes(installation: Installation) -> tuple[Volume, ...]:
    """Return the volume with the Python packages, for an image without them."""
    packages = installation.python_environment
    if packages is None:
        return ()
    return (pods.claim("packages", packages.mount_path, packages.claim_name, read_only=True),)


def packages_env(installation: Installation) -> dict[str, str]:
    """Return the variable that points Python to that volume."""
    packages = installation.python_environment
    return {} if packages is None else {"PYTHONPATH": packages.python_path}
