"""etcd and kube-apiserver alone on 127.0.0.1: a real API server for tests that need no node.

    with ControlPlane() as plane:
        plane.kubectl("apply", "-f", "crds/")

Several may run side by side. Nothing survives the thread that started it, not even after SIGKILL.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from marlaas_e2e import binaries
from marlaas_e2e.api import ApiClient
from marlaas_e2e.certificates import KeyPair
from marlaas_e2e.kubectl import run_kubectl
from marlaas_e2e.processes import Daemon, NotReady, free_ports
from marlaas_e2e.servers import Addresses, Servers

READY_TIMEOUT_S = 120.0
_TRIES = 3


class ControlPlane:
    """One API server with its etcd; by default without controllers.

    Without controllers nothing collects owned objects, no namespace finishes its deletion and no Deployment gets
    pods. `controllers=True` adds kube-controller-manager (all three then happen, but for the pods' running).
    """

    def __init__(self, *, controllers: bool = False) -> None:
        self._wants_controllers = controllers
        self._controllers: Daemon | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Boot and wait until ready: a few seconds. Raises NotReady with the failing server's last words."""
        binaries.ensure((*binaries.CONTROL_PLANE, *(["kube-controller-manager"] if self._wants_controllers else [])))
        for attempt in range(1, _TRIES + 1):  # a port may be taken between the choice and the listening
            try:
                self._boot()
                return
            except NotReady as error:
                self.stop()
                if attempt == _TRIES or "address already in use" not in str(error):
                    raise

    def stop(self) -> None:
        """End every process and delete every file; may be called twice."""
        for daemon in (self._controllers, getattr(self, "apiserver", None), getattr(self, "etcd", None)):
            if daemon is not None:
                daemon.kill()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return self._servers.addresses.api_url

    @property
    def authority(self) -> Path:
        """PEM file that the server's certificate is checked against."""
        return self._servers.authority.own.certificate

    @property
    def admin(self) -> KeyPair:
        return self._servers.authority.client("admin", ["system:masters"])

    @property
    def etcd_port(self) -> int:
        return self._servers.addresses.etcd_port

    @property
    def kubeconfig(self) -> Path:
        return self._servers.kubeconfig_with(self.admin)

    def user_kubeconfig(self, name: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig of any user, who may do what RBAC grants: a person, or `system:serviceaccount:NS:NAME`."""
        return self._servers.kubeconfig(name, groups)

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        return run_kubectl(kubeconfig or self.kubeconfig, arguments, stdin)

    def kill_apiserver(self) -> None:
        """SIGKILL: every connection is reset, new ones are refused until `start_apiserver`."""
        self.apiserver.kill()

    def start_apiserver(self) -> None:
        """Start it again on the same port and wait until it is ready."""
        self.apiserver.start()
        self.apiserver.wait_ready(self.ready, READY_TIMEOUT_S)

    def ready(self) -> bool:
        client = ApiClient(self.url, str(self.authority), self.admin)
        try:
            return client.healthy()
        finally:
            client.close()

    def _boot(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="marlaas-control-plane-"))
        api, etcd, peer, controllers = free_ports(4)
        self._servers = Servers(self.folder, Addresses(api, etcd, peer))
        self.etcd = self._daemon("etcd", self._servers.etcd())
        self.apiserver = self._daemon("kube-apiserver", self._servers.api_server())
        self.etcd.start()
        self.start_apiserver()
        if self._wants_controllers:  # before the API server is ready it would end for good
            self._controllers = self._daemon("kube-controller-manager", self._servers.controller_manager(controllers))
            self._controllers.start()

    def _daemon(self, name: str, command: Sequence[str | Path]) -> Daemon:
        return Daemon(name, command, self.folder / f"{name}.log")
