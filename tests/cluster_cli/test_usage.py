"""`marlaas usage` without a folder, against a real API server."""

import csv
import io
import json
from typing import Any

import pytest

Shell = Any
"""The conftest's."""

USED = {"generatedTokens": 100, "trainedTokens": 70, "staleTokens": 10, "openTokens": 20, "trainerSeconds": 2.5}
TENANT = """\
apiVersion: marlaas.dev/v1alpha1
kind: Tenant
metadata: {name: POOL}
spec:
  namespaces: [POOL]
"""


@pytest.fixture
def used(shell: Shell) -> Shell:
    """Two jobs, of which one has a status with usage, and a tenant that has deleted a third one."""
    shell.submit()
    shell.run("submit", shell.write(shell.job.replace("name: sums", "name: other")))
    shell.run("submit", shell.write(TENANT, "tenant.yaml"))
    agents = [{"name": "policy", "policyVersion": 3, "usage": {"generatedTokens": 80, "trainedTokens": 70}}]
    shell.set_status("rljob", "sums", {"tenant": shell.namespace, "usage": USED, "agents": agents})
    deleted = {"generatedTokens": 7, "failedTokens": 7}
    shell.set_status("tenant", shell.namespace, {"usage": USED | {"generatedTokens": 107}, "deletedUsage": deleted})
    return shell


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_cluster_shows_the_jobs_of_the_namespace_below_their_tenant(used: Shell) -> None:
    said = used.run("usage")
    assert said.code == 0, said.err
    rows = [line.split()[0] for line in said.out.splitlines()]
    assert rows == ["TENANT", used.namespace, f"{used.namespace}/other", f"{used.namespace}/sums"]


def test_csv_and_json_have_every_amount_and_json_also_those_of_agents(used: Shell) -> None:
    other, sums = lines(used.run("usage", "--csv").out)
    assert (other["job"], other["generated_tokens"]) == ("other", "0")
    assert (sums["tenant"], sums["job"], sums["trained_tokens"], sums["wasted_tokens"]) == (
        used.namespace,
        "sums",
        "70",
        "10",
    )
    assert sums["trainer_s"] == "2.5"
    told = json.loads(used.run("usage", "--job", "sums", "--json").out)
    assert (told["open_tokens"], told["agents"]["policy"]["trained_tokens"]) == (20, 70)


def test_in_all_namespaces_the_lines_add_up_to_the_tenants_total(used: Shell) -> None:
    mine = [line for line in lines(used.run("usage", "-A", "--csv").out) if line["tenant"] == used.namespace]
    assert [line["job"] for line in mine] == ["other", "sums", ""]
    total = used.get("tenant", used.namespace)["status"]["usage"]["generatedTokens"]
    assert sum(int(line["generated_tokens"]) for line in mine) == total == 107


def test_who_may_not_read_tenants_sees_the_jobs_and_is_told_what_is_missing(
    used: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    used.kubectl("create", "clusterrole", f"jobs-{used.namespace}", "--verb=list", "--resource=rljobs.marlaas.dev")
    role = f"--clusterrole=jobs-{used.namespace}"
    used.kubectl("create", "clusterrolebinding", f"jobs-{used.namespace}", role, "--user=eve")
    monkeypatch.setenv("KUBECONFIG", str(used.plane.user_kubeconfig("eve")))
    said = used.run("usage", "-A", "--csv")
    assert said.code == 0, said.err
    assert "without the usage of deleted jobs" in said.err
    assert "sums" in {line["job"] for line in lines(said.out)}


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("usage", "--job", "sum"), 2, "no RLJob 'sum' in the namespace"),
        (("usage", "runs/first", "-A"), 2, "DIR takes no option of a cluster"),
        (("usage", "--csv", "--json"), 2, "choose one"),
        (("usage", "--csv"), 0, "no RLJobs in the namespace; -A shows all namespaces"),
    ],
)
def test_what_cannot_be_shown_is_said(shell: Shell, words: tuple[str, ...], code: int, sentence: str) -> None:
    said = shell.run(*words)
    assert (said.code, sentence in said.err) == (code, True)
