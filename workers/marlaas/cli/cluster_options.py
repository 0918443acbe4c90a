"""The options for cluster and namespace, with the same names as in kubectl."""

from typing import Annotated

import typer

from marlaas.cluster.kubectl import ClusterTarget, Kubectl

Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; its current one.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace; the context's own when absent.")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig; kubectl's own choice.")
]


def gateway(context: str | None, namespace: str | None, kubeconfig: str | None) -> Kubectl:
    """Return the kubectl client for the cluster that the options select."""
    return Kubectl(ClusterTarget(context, namespace, kubeconfig))
