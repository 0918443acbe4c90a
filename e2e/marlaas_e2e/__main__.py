"""The cluster on the command line: python -m marlaas_e2e up | down | status | shell | import IMAGE.tar | run CMD..."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from marlaas_e2e import binaries, packages
from marlaas_e2e.binaries import CannotBuild
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.node import cluster
from marlaas_e2e.node.cluster import CannotRun, Running
from marlaas_e2e.node.layout import Layout, default_layout
from marlaas_e2e.node.store import ImageStore
from marlaas_e2e.packages import NotInstalled
from marlaas_e2e.processes import NotReady

STATE = "MARLAAS_E2E_ROOT"
UNABLE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Status of the command, or 1 with one sentence."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is undone
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (CannotBuild, CannotRun, CommandFailed, NotInstalled, NotReady) as error:
        print(error, file=sys.stderr)
        return 1


def tools(options: argparse.Namespace) -> int:
    """build these programs, or all, where they are missing"""
    binaries.ensure(options.names or tuple(binaries.BINARIES))
    return 0


def install(_: argparse.Namespace) -> int:
    """install what is missing from the distribution (root); with E2E_CONTEXT only what images need"""
    packages.install(node=Elsewhere.said().context is None)
    return 0


def able(_: argparse.Namespace) -> int:
    """exit with 3 and the reason where no package could make this machine hold a node"""
    try:
        if Elsewhere.said().context is None:
            cluster.check_rights()
    except CannotRun as error:
        print(error)
        return UNABLE
    return 0


def up(options: argparse.Namespace) -> int:
    """bring the cluster up and leave it running"""
    started = time.monotonic()
    cluster.up(_layout(options))
    print(f"up in {time.monotonic() - started:.1f} s; enter it with `python -m marlaas_e2e shell`")
    return 0


def down(options: argparse.Namespace) -> int:
    """take it down; its images stay"""
    cluster.down(_layout(options))
    return 0


def status(options: argparse.Namespace) -> int:
    """what runs"""
    layout = _layout(options)
    found = cluster.running(layout)
    if found is None:
        print("not running")
        return 1
    print(f"running: process {found.init}, files in {layout.run}")
    print(cluster.kubectl(layout, found, "get", "nodes,pods", "--all-namespaces", "-o", "wide"))
    return 0


def shell(options: argparse.Namespace) -> int:
    """a shell in the cluster's network, with kubectl and helm"""
    options.words = [os.environ.get("SHELL", "bash")]
    return run(options)


def bring(options: argparse.Namespace) -> int:
    _required(_layout(options))
    for archive in options.archives:
        ImageStore(_layout(options)).read_in(archive)
    return 0


def run(options: argparse.Namespace) -> int:
    """run a command inside the cluster, brought up for it unless it runs already; with E2E_CONTEXT only the command"""
    if Elsewhere.said().context is not None:
        return subprocess.run(options.words).returncode
    layout = _layout(options)
    with cluster.cluster(layout) as found:
        command = ["setpriv", "--pdeathsig", "TERM", "--", *cluster.inside(found, options.words)]  # not outliving us
        return subprocess.run(command, env=_environment(layout)).returncode


def _layout(options: argparse.Namespace) -> Layout:
    return Layout(options.root.resolve()) if options.root else default_layout()


def _environment(layout: Layout) -> dict[str, str]:
    """kubectl and helm of the right version first on the PATH, and the administrator's kubeconfig."""
    programs = [str(binaries.path(name).parent) for name in ("kubectl", "helm")]
    path = os.pathsep.join([*programs, os.environ.get("PATH", "")])
    return os.environ | {STATE: str(layout.root), "KUBECONFIG": str(layout.kubeconfig), "PATH": path}


def _required(layout: Layout) -> Running:
    if (found := cluster.running(layout)) is None:
        raise CannotRun("No cluster runs: python -m marlaas_e2e up")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m marlaas_e2e", description=__doc__)
    parser.add_argument("--root", type=Path, metavar="DIR", help="a cluster of its own there, beside that in the cache")
    commands = parser.add_subparsers(required=True)
    plain = (("able", able), ("packages", install), ("up", up), ("down", down), ("status", status), ("shell", shell))
    for name, function in plain:
        commands.add_parser(name, help=function.__doc__).set_defaults(command=function)
    building = commands.add_parser("tools", help=tools.__doc__)
    building.add_argument("names", nargs="*", choices=[[], *binaries.BINARIES], metavar="NAME")
    building.set_defaults(command=tools)
    importing = commands.add_parser("import", help="read image archives into the running cluster")
    importing.add_argument("archives", nargs="+", type=Path)
    importing.set_defaults(command=bring)
    running = commands.add_parser("run", help=run.__doc__)
    running.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    running.set_defaults(command=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
