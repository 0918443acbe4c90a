"""The API server of the tests: real users and rights, kills and restarts, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.node import host

_STARTS_ONE = """
import time
from marlaas_e2e.control_plane import ControlPlane
plane = ControlPlane()
plane.start()
print(plane.etcd.pid, plane.apiserver.pid, plane.folder, flush=True)
time.sleep(600)
"""


def test_users_and_service_accounts_may_do_what_rbac_grants_them(control_plane: ControlPlane) -> None:
    binding = ("--clusterrole=test-readers", "--group=test-readers")
    control_plane.kubectl("create", "clusterrole", "test-readers", "--verb=list", "--resource=configmaps")
    control_plane.kubectl("create", "clusterrolebinding", "test-readers", *binding)
    anna = control_plane.user_kubeconfig("anna", ["test-readers"])
    assert control_plane.kubectl("get", "configmaps", "--output=name", kubeconfig=anna) == ""
    with pytest.raises(CommandFailed, match='User "anna" cannot create'):
        control_plane.kubectl("create", "configmap", "x", kubeconfig=anna)
    robot = control_plane.user_kubeconfig("system:serviceaccount:default:robot", ["system:serviceaccounts"])
    with pytest.raises(CommandFailed, match=r'User "system:serviceaccount:default:robot" cannot list'):
        control_plane.kubectl("get", "secrets", kubeconfig=robot)


def test_a_killed_api_server_comes_back_with_what_it_knew(control_plane: ControlPlane) -> None:
    control_plane.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    control_plane.kill_apiserver()
    assert not control_plane.ready()
    control_plane.start_apiserver()
    assert control_plane.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"


def test_nothing_survives_a_test_run_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", _STARTS_ONE], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    etcd, apiserver, folder = run.stdout.readline().split()
    run.kill()
    run.communicate()
    for pid in (etcd, apiserver):
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=30, check=True)  # waits for its end
        assert host.birth_of(int(pid)) is None
    for left in sorted(Path(folder).rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    Path(folder).rmdir()
