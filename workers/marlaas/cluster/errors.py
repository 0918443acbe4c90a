"""Errors of a cluster, as sentences for the user."""

from marlaas_api.errors import InvalidInput, Permanent, Retryable


class KubectlMissing(Permanent):
    """kubectl is not on PATH."""


class NoCluster(Permanent):
    """The kubeconfig names no cluster, or does not have the requested context."""


class ClusterSilent(Retryable):
    """The API server does not answer."""


class NotLoggedIn(Permanent):
    """The API server rejects the user's credentials."""


class AccessDenied(Permanent):
    """The user's permissions do not allow this request."""


class ObjectMissing(Permanent):
    """The object does not exist."""


class KindsMissing(Permanent):
    """MARLaaS's CRDs are not installed in the cluster."""


class Refused(InvalidInput):
    """The API server rejects an object. `causes` holds (field, sentence) for each wrong field that it names."""

    def __init__(self, text: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.causes = causes


class CommandFailed(Permanent):
    """kubectl failed with an error that no pattern matches; the text is kubectl's own."""
