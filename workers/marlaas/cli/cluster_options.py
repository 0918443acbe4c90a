"""The options that say which cluster and namespace, spelt as kubectl spells them."""

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
    """The cluster that the options mean."""
    return Kubectl(ClusterTarget(context, namespace, kubeconfig))
