"""How a worker process is started in a pod; the same command as `marlaas run` uses (`marlaas.local.processes`)."""

from marlaas_operator.installation import Installation
from marlaas_operator.manifests import pods
from marlaas_operator.manifests.pods import Volume

PYTHON = ("python3", "-P", "-s", "-m")
"""-P: what lies in the image's working folder is nothing that a role imports. -s: nor what lies below HOME, which a sandbox shares with the
environment's code, and which outlives a container: a `usercustomize` left there would run in the next supervisor."""


def worker_command(role: str, nats_url: str, blobs_url: str) -> list[str]:
    """Command of a role; its document's file is to follow. The replica's name is its pod's."""
    return [
        *(*PYTHON, "marlaas_worker", role),
        *("--nats", nats_url, "--blobs", blobs_url),
        *("--name", "$(POD_NAME)", "--scratch", pods.SCRATCH),
        *("--creds", f"{pods.BUS_FOLDER}/{pods.CREDENTIAL}", "--health", str(pods.HEALTH_PORT)),
    ]


def packages_volumes(installation: Installation) -> tuple[Volume, ...]:
    """The Python packages, where the image has none."""
    packages = installation.python_environment
    if packages is None:
        return ()
    return (pods.claim("packages", packages.mount_path, packages.claim_name, read_only=True),)


def packages_env(installation: Installation) -> dict[str, str]:
    """Where Python finds them."""
    packages = installation.python_environment
    return {} if packages is None else {"PYTHONPATH": packages.python_path}
