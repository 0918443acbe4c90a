"""The commands against a real API server, as people run them; statuses are written by hand, no operator is there."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.tables import data, rows

from marlaas import Cluster
from marlaas.cli import plugin
from marlaas.clusters import JobFailed
from marlaas.manifest.findings import InvalidManifest
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.problems import parse

Shell = Any
"""The conftest's."""


def test_submit_creates_then_finds_nothing_to_change_then_changes(shell):
    first = shell.run("submit", shell.write(shell.both))
    assert (first.code, first.err) == (0, "")
    assert f"ModelPool {shell.namespace}: created; tiny; 1 engine" in first.out
    assert f"RLJob {shell.namespace}/sums: created; dapo, 8 steps" in first.out
    assert f"watch: kubectl marlaas watch -n {shell.namespace} sums" in first.out
    assert f"RLJob {shell.namespace}/sums: unchanged" in shell.run("submit", shell.write(shell.both)).out
    assert "sums: changed" in shell.run("submit", shell.write(shell.both.replace("steps: 8", "steps: 9"))).out
    assert shell.get("rljob", "sums")["spec"]["training"]["steps"] == 9


def test_the_plugins_eval_applies_jobs_without_steps_and_prints_the_results_of_those_that_have_ended(shell):
    suites = "evaluation: {suites: [{name: greedy, tasks: 8, temperature: 0}, {name: twice, samples: 2}]}"
    export = "export: {trackers: [wandb]}\n  suspend: true\n  agents:"
    path = shell.write(f"{shell.job}  {suites}\n  {export}\n")
    shell_eval = ("eval", path, "--adapter", "/adapters/a")
    said = shell.run(*shell_eval, "--no-wait", entry=plugin)
    assert (said.code, said.out) == (0, f"RLJob {shell.namespace}/sums-eval: created; evaluation only\n"), said.err
    spec = shell.get("rljob", "sums-eval")["spec"]
    assert (spec["training"]["steps"], spec["export"], spec["suspend"]) == (0, {}, False)
    assert len(spec["evaluation"]["suites"]) == 2
    assert [agent["initFrom"] for agent in spec["agents"]] == [{"path": "/adapters/a"}]
    greedy = {"name": "greedy", "before": 0.5, "standardError": 0.125}
    twice = {"name": "twice", "before": 0.25, "passAt": {"2": 0.5, "1": 0.25}, "majority": 0.3}
    shell.set_status("rljob", "sums-eval", {"phase": "Succeeded", "suites": [greedy, twice]})
    said = shell.run(*shell_eval, entry=plugin)
    here = f"{shell.namespace}/sums-eval"
    assert f"{here}: greedy 0.500 ± 0.12\n{here}: twice 0.250, pass@1 0.250, pass@2 0.500, majority 0.300\n" in said.out
    for options, words in ((["--suffix", "X"], "metadata.name"), (["--adapter", "b=/c"], "has no such agent")):
        said = shell.run("eval", path, *options, entry=plugin)
        assert (said.code, words in said.err) == (2, True), said.err
    said = shell.run("eval", path, entry=plugin)
    assert (said.code, "cannot change once the job exists" in said.err) == (2, True)


def test_python_submits_objects_waits_for_jobs_and_suspends_them(shell):
    pool, job = (parse(kind, body) for kind, body in zip((ModelPool, RLJob), shell.objects(), strict=True))
    cluster = Cluster()
    (submitted,) = cluster.submit(pool, job)
    assert [one.name for one in cluster.jobs()] == [submitted.name] == ["sums"]
    assert submitted.status().phase is None
    with pytest.raises(TimeoutError, match="goes on after 0 s"):
        submitted.wait(0)
    submitted.suspend()
    assert shell.get("rljob", "sums")["spec"]["suspend"]
    for phase in ("Succeeded", "Failed"):
        shell.set_status("rljob", "sums", {"phase": phase, "reason": "TooManyFaults", "message": "why"})
        if phase == "Succeeded":
            assert cluster.job(f"{shell.namespace}/sums").wait().phase == phase
    with pytest.raises(JobFailed, match="TooManyFaults: why"):
        submitted.wait()
    with pytest.raises(InvalidManifest, match=r"spec\.training\.steps: the API server rejects this"):
        cluster.submit(shell.write(shell.job.replace("steps: 8", "steps: 4")))


def test_submit_owns_only_what_was_written_and_applies_nothing_when_one_object_is_refused(shell):
    shell.submit()
    body = json.loads(shell.kubectl("get", "rljob", "sums", "--output=json", "--show-managed-fields"))
    (entry,) = body["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("marlaas", "Apply")
    assert set(entry["fieldsV1"]["f:spec"]) == {"f:poolRef", "f:environment", "f:training"}
    fine = shell.job.replace("name: sums", "name: other")
    said = shell.run("submit", shell.write(f"{fine}---\n{shell.job.replace('steps: 8', 'steps: 4')}"))
    assert said.code == 2
    words = "job.yaml:17: spec.training.steps: the API server rejects this: Invalid value: 4: may be raised"
    assert said.err.startswith(words)
    assert shell.kubectl("get", "rljobs", "--output=name").split() == ["rljob.marlaas.dev/sums"]


@pytest.mark.parametrize(("there", "words", "code", "sentence"), rows(__file__, "impossible"))
def test_a_command_that_cannot_be_done_says_what_is_wrong(shell, there, words, code, sentence):
    """there: a job `sums` exists. The first word after `submit` is put into the manifest."""
    if there:
        shell.submit()
    if words[0] == "submit":
        text = shell.job.replace("{name: sums}" if "name" in words[1] else "steps: 8", words[1])
        words = ("submit", shell.write(text), *words[2:])
    said = shell.run(*words)
    assert said.code == code
    assert sentence.replace("namespace NAMESPACE", f"namespace {shell.namespace}") in said.err


def test_validate_asks_the_server_and_changes_nothing(shell):
    shell.submit()
    assert shell.run("validate", "--server", shell.write()).code == 0
    said = shell.run("validate", "--server", shell.write(shell.job.replace("name: reverse", "name: calculator")))
    assert said.code == 2
    fixed = "Invalid value: cannot change once the job exists; delete the job and create a new one"
    assert said.err.strip() == f"job.yaml:6: spec.environment: the API server rejects this: {fixed}"
    said = shell.run(
        "submit", shell.write(shell.job.replace("name: sums", "name: new") + "  export: {hub: {repo: a/b}}")
    )
    assert (said.code, "spec.export.hub: a cluster takes the hub's token from a Secret" in said.err) == (2, True)
    assert '"new"' not in shell.kubectl("get", "rljobs", "--output=json"), "nothing is applied"
    shell.write(shell.job.replace("name: reverse", "name: calculator"))
    as_json = shell.run("validate", "--server", "--json", "job.yaml")
    assert json.loads(as_json.out)["errors"][0]["line"] == 6


def test_suspend_and_resume_set_one_field_and_say_what_follows(shell):
    shell.submit()
    said = shell.run("suspend", "sums")
    words = "suspended: the job stops and frees its resources; kubectl marlaas resume sums"
    assert said.out.strip() == f"{shell.namespace}/sums: {words} -n {shell.namespace}"
    assert shell.get("rljob", "sums")["spec"]["suspend"] is True
    shell.submit()
    assert shell.get("rljob", "sums")["spec"]["suspend"] is True, "submitting the manifest again does not resume it"
    assert "spec.suspend is already true" in shell.run("suspend", "sums").out
    assert "the job continues once it is admitted" in shell.run("resume", "sums").out
    assert shell.get("rljob", "sums")["spec"]["suspend"] is False


def test_why_names_the_pools_own_cause(shell):
    shell.submit(shell.both)
    shell.set_status("rljob", "sums", {"phase": "Queued", "reason": "WaitingForPool", "message": "no engine yet"})
    broken = {"type": "RolloutReady", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    broken |= {"reason": "ModelNotFound", "message": "there is no /model/config.json"}
    shell.set_status("modelpool", shell.namespace, {"rollout": {"ready": 0}, "conditions": [broken]})
    said = shell.run("why", "sums")
    assert said.code == 0
    assert f"{shell.namespace}/sums has been queued for " in said.out
    assert "The pool is not ready because of ModelNotFound" in said.out
    assert "there is no /model/config.json." in said.out
    assert "What to do (platform team): Put the model there" in said.out


def test_why_tells_the_last_warning_of_the_jobs_events(shell):
    shell.submit()
    meta = shell.get("rljob", "sums")["metadata"]
    event = data(__file__, "event")
    event["metadata"] |= {"namespace": shell.namespace}
    event["regarding"] |= {"namespace": shell.namespace, "uid": meta["uid"]}
    event["eventTime"] = meta["creationTimestamp"].replace("Z", ".000000Z")
    shell.plane.kubectl("create", "--filename=-", stdin=json.dumps(event))
    shell.set_status("rljob", "sums", {"phase": "Running", "reason": "SandboxStarting"})
    assert "PodRefused: exceeded quota: pods=0." in shell.run("why", "sums").out


def test_watch_ends_with_the_jobs_and_says_whether_one_failed(shell):
    shell.submit(f"{shell.job}---\n{shell.job.replace('name: sums', 'name: other')}")
    shell.set_status("rljob", "sums", {"phase": "Succeeded", "step": 8, "steps": 8, "reward": 0.5})
    shell.set_status("rljob", "other", {"phase": "Failed", "reason": "TooManyFaults", "message": "env: KeyError"})
    everything = shell.run("watch")
    assert everything.code == 1
    assert f"{shell.namespace}/sums: Succeeded, step 8/8, version ·, reward 0.50" in everything.out
    assert "TooManyFaults: env: KeyError" in everything.out
    assert shell.run("watch", "sums").code == 0
    lines = [json.loads(line) for line in shell.run("watch", "sums", "--json").out.splitlines()]
    assert [line["phase"] for line in lines if line["type"] == "progress"] == ["Succeeded"]
    over = shell.run("suspend", "other")
    sentence = f"{shell.namespace}/other has failed: a finished job cannot be suspended"
    assert (over.code, over.err.strip()) == (2, sentence)


def test_who_may_not_is_told_what_they_may_not_and_whom_to_ask(shell, monkeypatch):
    shell.submit()
    monkeypatch.setenv("KUBECONFIG", str(shell.plane.user_kubeconfig("ann")))
    said = shell.run("why", "sums", "-n", shell.namespace)
    assert said.code == 1
    assert said.err.startswith('not allowed: rljobs.marlaas.dev "sums" is forbidden: User "ann" cannot get')
    assert "ask the platform team" in said.err
    refused = shell.run("submit", shell.write(shell.both), "-n", shell.namespace)
    assert refused.code == 2
    assert "submit only the jobs with --jobs-only" in refused.err


def test_a_tenant_who_sees_no_pools_and_no_events_still_gets_an_answer(shell, monkeypatch):
    shell.submit(shell.both)
    shell.kubectl("create", "role", "jobs", "--verb=get,list", "--resource=rljobs.marlaas.dev")
    shell.kubectl("create", "rolebinding", "bob", "--role=jobs", "--user=bob")
    shell.set_status("rljob", "sums", {"phase": "Queued", "reason": "WaitingForPool", "message": "not yet"})
    monkeypatch.setenv("KUBECONFIG", str(shell.plane.user_kubeconfig("bob")))
    said = shell.run("why", "sums", "-n", shell.namespace)
    assert said.code == 0
    assert "WaitingForPool" in said.out
    assert "Pool " not in said.out


def test_kubectl_runs_the_plugin(shell, tmp_path):
    shell.submit()
    plugin = tmp_path / "bin" / "kubectl-marlaas"
    plugin.parent.mkdir()
    plugin.write_text(f"#!{sys.executable}\nfrom marlaas.cli import plugin\nplugin()\n")
    plugin.chmod(0o755)
    environment = {**os.environ, "PATH": f"{plugin.parent}{os.pathsep}{os.environ['PATH']}"}

    def kubectl(*words):
        return subprocess.run(["kubectl", "marlaas", *words], capture_output=True, text=True, env=environment)

    answer = kubectl("why", "sums")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"{shell.namespace}/sums was created ")
    usage = kubectl("watch", "--help")
    assert "Usage: kubectl marlaas watch" in usage.stdout


def test_validate_estimates_from_the_jobs_that_have_succeeded_on_the_pool(shell):
    """8 steps of 8 groups of 8 took 600 s, and an eighth of the tokens were of held-out tasks."""
    sampled = f"{shell.job}  rollout: {{groupSize: 8}}\n  evaluation: {{every: 8, tasks: 32}}\n"
    job = sampled.replace("steps: 8", "steps: 8\n    groupsPerStep: 8")
    shell.submit(f"{shell.both.partition('---')[0]}---\n{job}")
    used = {"generatedTokens": 4096, "evaluationTokens": 512, "engineSeconds": 160, "trainerSeconds": 40}
    status = {"usage": {**used, "admittedSeconds": 600}, "finishedAt": "2026-11-02T10:00:00Z"}
    longer = shell.write(job.replace("steps: 8", "steps: 16").replace("name: sums", "name: more"))
    said = shell.run("validate", longer, "--server", "--estimate")
    assert (said.code, "at most" in said.out, "has ended on the pool" in said.out) == (0, True, True), said.err
    shell.set_status("rljob", "sums", {"phase": "Succeeded", **status})
    said = shell.run("validate", longer, "--server", "--estimate")
    # 1,024 episodes of 7 tokens and 96 held-out ones of 8. Of 600 s, 540 were for 512 episodes and 60 for 64.
    assert "1,024 training episodes, 96 held-out episodes, about 7,900 tokens; 19 m 30 s beside" in said.out
    assert "the other jobs of the pool (engine 5 m 10 s, trainer 1 m 20 s), as measured on 2026-11-02" in said.out
