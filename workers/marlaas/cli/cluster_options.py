"""Options that select a cluster and its namespaces, and the kubectl client for them."""

from typing import Annotated

import typer

from marlaas.cluster.kubectl import ClusterTarget, Kubectl

Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. [default: the current one]")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace. [default: the context's]")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Path of the kubeconfig. [default: kubectl's]")
]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")]


def gateway(context: str | None, namespace: str | None, kubeconfig: str | None) -> Kubectl:
    """Return the kubectl client for the cluster that the options select."""
    return Kubectl(ClusterTarget(context, namespace, kubeconfig))
