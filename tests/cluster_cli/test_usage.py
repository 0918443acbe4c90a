"""`marlaas usage` without a folder, against a real API server."""

import csv
import io
import json
from typing import Any

import pytest
from tests.tables import rows

from marlaas_api.kinds.status import unix_seconds

Shell = Any
"""The conftest's."""

USED = {"generatedTokens": 100, "trainedTokens": 70, "staleTokens": 10, "openTokens": 20, "trainerSeconds": 2.5}
USED |= {"slotSeconds": 6, "storedBytes": 3000}
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
    own = {"generatedTokens": 80, "trainedTokens": 70, "slotSeconds": 4.5, "storedBytes": 2000}
    other = {"slotSeconds": 1.5, "storedBytes": 1000}
    agents = [{"name": "policy", "policyVersion": 3, "usage": own}, {"name": "critic", "usage": other}]
    shell.set_status("rljob", "sums", {"tenant": shell.namespace, "usage": USED, "agents": agents})
    shell.set_status("rljob", "other", {"tenant": shell.namespace})
    deleted = {"generatedTokens": 7, "failedTokens": 7}
    shell.set_status("tenant", shell.namespace, {"usage": USED | {"generatedTokens": 107}, "deletedUsage": deleted})
    return shell


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_usage_is_shown_below_its_tenant_and_as_csv_and_json_and_adds_up_to_the_total(used, monkeypatch):
    said = used.run("usage")
    assert said.code == 0, said.err
    rows = [line.split()[0] for line in said.out.splitlines()]
    assert rows == ["TENANT", used.namespace, f"{used.namespace}/other", f"{used.namespace}/sums", "policy", "critic"]

    other, sums = lines(used.run("usage", "--csv").out)
    assert (other["job"], other["generated_tokens"]) == ("other", "0")
    shown = [sums[name] for name in ("tenant", "job", "trained_tokens", "wasted_tokens", "trainer_s")]
    assert shown == [used.namespace, "sums", "70", "10", "2.5"]
    told = json.loads(used.run("usage", "--job", "sums", "--json").out)
    assert (told["open_tokens"], told["agents"]["policy"]["trained_tokens"]) == (20, 70)
    held = [(one["slot_s"], one["stored_bytes"]) for one in (told, *told["agents"].values())]
    assert held == [(6.0, 3000), (4.5, 2000), (1.5, 1000)]

    mine = [line for line in lines(used.run("usage", "-A", "--csv").out) if line["tenant"] == used.namespace]
    assert [line["job"] for line in mine] == ["other", "sums", ""]
    total = used.get("tenant", used.namespace)["status"]["usage"]["generatedTokens"]
    assert sum(int(line["generated_tokens"]) for line in mine) == total == 107

    used.kubectl("create", "clusterrole", f"jobs-{used.namespace}", "--verb=list", "--resource=rljobs.marlaas.dev")
    role = f"--clusterrole=jobs-{used.namespace}"
    used.kubectl("create", "clusterrolebinding", f"jobs-{used.namespace}", role, "--user=eve")
    monkeypatch.setenv("KUBECONFIG", str(used.plane.user_kubeconfig("eve")))
    said = used.run("usage", "-A", "--csv")
    assert said.code == 0, said.err
    assert "deleted jobs are missing" in said.err, "eve may not read Tenants"
    assert "sums" in {line["job"] for line in lines(said.out)}


@pytest.mark.parametrize(("words", "code", "sentence"), rows(__file__, "usage_words"))
def test_what_cannot_be_shown_is_said(shell, words, code, sentence):
    said = shell.run(*words)
    assert (said.code, sentence in said.err) == (code, True)


def mark(at: str, usage: dict[str, Any]) -> tuple[str, str]:
    return f"{at[:13]}Z", json.dumps({"at": unix_seconds(at), "usage": usage})


def marked(shell: Shell, *marks: tuple[str, dict[str, Any]]) -> None:
    """Store the history that an operator would keep of the tenant's totals."""
    data = dict(mark(*one) for one in marks)
    history = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "history"}, "data": data}
    shell.kubectl("apply", "--filename", shell.write(json.dumps(history), "history.json"))
    shell.set_status("tenant", shell.namespace, {"usageHistory": f"{shell.namespace}/history"})


def of_tenant(shell: Shell, *options: str) -> dict[str, str]:
    (line,) = [one for one in lines(shell.run("usage", *options, "--csv").out) if one["tenant"] == shell.namespace]
    return line


def test_the_usage_of_a_period_is_the_difference_of_two_marks(used):
    early, late = {"generatedTokens": 20, "openTokens": 20}, {"generatedTokens": 50, "trainedTokens": 50}
    marked(used, ("2026-01-01T00:00:05+00:00", early), ("2026-02-01T00:00:07+00:00", late))
    january = of_tenant(used, "--since", "2026-01-01T00:30Z", "--until", "2026-02-01T01:00")
    assert (january["since"], january["until"]) == ("2026-01-01T00:00:05Z", "2026-02-01T00:00:07Z")
    assert (january["generated_tokens"], january["trained_tokens"], january["open_tokens"]) == ("30", "50", "-20")
    until_now = of_tenant(used, "--since", "2026-02-02")
    assert (until_now["since"], until_now["generated_tokens"]) == ("2026-02-01T00:00:07Z", "57")
    assert any(line.startswith(used.namespace[:8]) for line in used.run("usage", "--since", "1h").out.splitlines())
    said = used.run("usage", "--since", "2025-01-01", "--json")
    assert f"Tenant {used.namespace} is counted from" not in said.err, "the Tenant is younger than the period"
    used.kubectl("delete", "configmap", "history")
    assert of_tenant(used, "--since", "1m")["generated_tokens"] == "0"


@pytest.mark.parametrize(("options", "reason"), rows(__file__, "periods"))
def test_a_period_that_makes_no_sense_is_refused(shell, options, reason):
    said = shell.run("usage", *options)
    assert said.code == 2
    assert reason in said.err.replace("\n", " ")
