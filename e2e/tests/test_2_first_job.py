"""The manifest of `marlaas run`, as it is, applied with kubectl: both teams' jobs learn and succeed."""

import time

from marlaas_e2e.platform import NAMESPACE, ROOT, Platform

JOBS = {"team-a": "reverse", "team-b": "calculator"}


def test_the_quickstart_learns_on_a_cluster(platform: Platform) -> None:
    for namespace in JOBS:
        platform.tenant(namespace)
    begun = time.monotonic()
    platform.kubectl("apply", "-f", ROOT / "examples" / "quickstart.yaml")
    platform.pool_ready("tiny")
    platform.stages["pool ready"] = time.monotonic() - begun
    for namespace, job in JOBS.items():
        status = platform.ended(job, namespace)
        platform.stages[f"{namespace}/{job} applied until Succeeded"] = time.monotonic() - begun
        assert status["phase"] == "Succeeded", status
        assert status["evalLast"] >= max(0.8, status["evalBefore"] + 0.4), status
        assert status["step"] == status["steps"]


def test_kubectl_get_shows_what_people_look_for(platform: Platform) -> None:
    heading, *rows = platform.kubectl("get", "rlj", "-A").splitlines()
    assert heading.split() == ["NAMESPACE", "NAME", "POOL", "PHASE", "STEP", "REWARD", "VERSION", "REASON", "AGE"]
    assert any(row.split()[:5] == ["team-a", "reverse", "tiny", "Succeeded", "28/28"] for row in rows), rows
    free = lambda: platform.status("modelpool", "tiny")["slots"] == "0/16"  # noqa: E731
    platform.until(free, "the slots of both jobs are free")
    heading, row = platform.kubectl("get", "mp").splitlines()
    assert heading.split() == ["NAME", "MODEL", "ROLLOUT", "TRAINER", "AGENTS", "JOBS", "AGE"]
    assert row.split()[:6] == ["tiny", "tiny", "1/1", "1/1", "0/16", "0"]


def test_describe_reads_like_a_story(platform: Platform) -> None:
    text = platform.kubectl("describe", "rljob", "reverse", "-n", "team-a")
    for word in ("Admitted", "SandboxReady", "Complete", "Succeeded"):
        assert word in text, text
    story = [line.split()[1] for line in text.partition("Events:")[2].splitlines()[3:] if line.strip()]
    assert story == ["Admitted", "SandboxReady", "Finished"], text


def test_a_finished_job_holds_nothing_but_its_adapter(platform: Platform) -> None:
    kinds = "deployments,networkpolicies,secrets,serviceaccounts,pods"
    ours = "app.kubernetes.io/managed-by=marlaas-operator"
    platform.until(lambda: not platform.names(kinds, "team-a", ours), "the sandbox of a finished job is gone")
    (agent,) = platform.status("rljob", "reverse", "team-a")["agents"]
    listing = platform.kubectl(
        "exec", "-n", NAMESPACE, "tiny-trainer-0", "-c", "trainer", "--", "find", "/var/lib/marlaas/blobs", "-type", "d"
    )
    assert agent["policyVersion"] == 28
    assert agent["adapter"].rstrip("/").rsplit("/", 1)[-1] in listing


def test_why_says_in_one_paragraph_what_became_of_it(platform: Platform) -> None:
    text = platform.why("reverse", "team-a")
    assert "28" in text
    assert "Succeeded" in text or "succeeded" in text
