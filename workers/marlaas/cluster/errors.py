"""What a cluster may answer instead of doing it, as sentences for the person who asked."""

from marlaas_api.errors import InvalidInput, Permanent, Retryable


class KubectlMissing(Permanent):
    """There is no kubectl on PATH."""


class NoCluster(Permanent):
    """The kubeconfig names no cluster, or not the context that was asked for."""


class ClusterSilent(Retryable):
    """The API server does not answer."""


class NotLoggedIn(Permanent):
    """The API server does not know who is asking."""


class AccessDenied(Permanent):
    """Whoever is asking may not do this."""


class ObjectMissing(Permanent):
    """There is no such object."""


class KindsMissing(Permanent):
    """The cluster does not know MARLaaS's kinds."""


class Refused(InvalidInput):
    """The API server does not take an object. text: its sentence; causes: (field, sentence) of every wrong field that it names."""

    def __init__(self, text: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.causes = causes


class CommandFailed(Permanent):
    """kubectl failed in a way that has no sentence of ours; the text is kubectl's own."""
