"""A hostile editor of one namespace, bound to `marlaas-rljob-editor` alone: what each try at something else meets."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from tests.tables import data, rows

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, endless, manifest, plain_pool, tenant

HOME, ELSEWHERE, EDITOR = "team-g", "team-h", "ed"
JOB, NEIGHBOUR, THIEF = "hostile", "neighbour", "thief"
BINDING, *FORGED = manifest("hostile-editor")
OWN = f"gen.{HOME}.{JOB}.policy"


def begin(_: Platform) -> list[Object]:
    """The hostile job opens all that a job may open; the thief starts from a folder of the blob store."""
    *_, job = manifest("own-image")
    job["metadata"] = {"name": JOB, "namespace": HOME, "labels": {"marlaas.dev/tenant": "rich"}}
    environment = job["spec"]["environment"]
    del environment["secretRefs"], environment["volumes"]
    environment["entrypoint"] = ["env", "MIRROR_LETTERS=abc", *environment["entrypoint"]]
    environment["egress"] = [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]
    stolen = [{"name": "policy", "initFrom": {"path": f"/var/lib/marlaas/blobs/{ELSEWHERE}"}}]
    objects = [job, endless(NEIGHBOUR, ELSEWHERE), endless(THIEF, HOME, agents=stolen)]
    return [*plain_pool(), *tenant(HOME), *tenant(ELSEWHERE), BINDING, *objects]


def refusal(platform: Platform, *words: str, stdin: str | None = None) -> str:
    """What the API server answers the editor; empty if it did what was asked."""
    try:
        platform.kubectl("--as", EDITOR, "-n", HOME, *words, stdin=stdin)
    except CommandFailed as error:
        return str(error)
    return ""


def create(platform: Platform, **environment: object) -> str:
    """As `refusal`, for a job with a part of the environment replaced; a dry run."""
    body = endless("mine", HOME, environment={"name": "reverse", **environment})
    return refusal(platform, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))


@pytest.fixture(scope="module")
def editor(platform: Platform) -> Platform:
    platform.until(lambda: not create(platform), "the editor may create jobs")
    return platform


@pytest.fixture(scope="module")
def pod(platform: Platform) -> str:
    """The hostile job's sandbox, which has connected to the bus: its address is known to the policies."""
    platform.until(lambda: platform.step(JOB, HOME), "the first step", 600)
    return str(platform.ready_pod(HOME, f"marlaas.dev/job={JOB}")["metadata"]["name"])


@pytest.mark.parametrize("request_", rows(__file__, "tenancy_requests"))
def test_the_api_server_forbids_all_but_rljobs_of_the_namespace(editor, request_):
    words, _, forged = request_.partition("|")
    body = next((each for each in FORGED if each["kind"] == forged), {})
    assert "forbidden" in refusal(editor, *words.split(), stdin=json.dumps(body)).lower()


@pytest.mark.parametrize(("environment", "sentence"), rows(__file__, "tenancy_jobs"))
def test_a_job_names_nothing_that_is_not_its_authors(editor, environment, sentence):
    assert sentence in create(editor, **environment)


@pytest.mark.parametrize(("spec", "sentence"), rows(__file__, "tenancy_changes"))
def test_a_job_gains_nothing_by_a_change(editor, spec, sentence):
    change = ("--type=merge", "--dry-run=server", "-p", json.dumps({"spec": spec}))
    assert sentence in refusal(editor, "patch", "rljob", JOB, *change)


def test_unknown_fields_and_a_forged_status_are_dropped_and_labels_make_no_tenant(editor, pod):
    forged = {"hostNetwork": True, "tenant": "rich", "weight": 1000}
    body = endless("mine", HOME, **forged) | {"status": {"tenant": "rich"}}
    words = ("--as", EDITOR, "create", "--dry-run=server", "--validate=ignore", "-o", "json", "-f", "-")
    created: dict[str, Any] = json.loads(editor.kubectl(*words, stdin=json.dumps(body)))
    assert not forged.keys() & created["spec"].keys()
    assert "status" not in created
    assert editor.status("rljob", JOB, HOME)["tenant"] == "tenant/default"
    assert "rich" not in editor.get("pod", pod, HOME)["metadata"]["labels"].values()


def test_egress_to_everywhere_opens_public_addresses_alone(platform, pod):
    def addresses(namespace: str, names: Iterable[str]) -> dict[str, str]:
        pods = platform.cluster.get("pods", "-n", namespace)["items"]
        found = {name: [each for each in pods if name in each["metadata"]["name"]] for name in names}
        return {name: each[0]["status"]["podIP"] for name, each in found.items()}

    engine = platform.get("pod", "plain-rollout-0", NAMESPACE)["status"]
    node = engine["hostIP"]
    ours = addresses(NAMESPACE, ("operator", "orchestrator", "plain-trainer", "nats"))
    places = {
        "public": ("198.51.100.10", 80),
        "bus": (ours["nats"], 4222),
        "bus monitor": (ours["nats"], 8222),
        "API server": ("10.96.0.1", 443),
        "API server's own address": platform.api_server(),
        "kubelet": (node, 10250),
        "etcd": (node, 2379),
        "containers' ports on the node": (node, 8081),
        "operator": (ours["operator"], 8080),
        "orchestrator": (ours["orchestrator"], 8081),
        "engine": (engine["podIP"], 8081),
        "trainer": (ours["plain-trainer"], 8081),
        "neighbour": (addresses(ELSEWHERE, (NEIGHBOUR,))[NEIGHBOUR], 8081),
        "metadata": ("169.254.169.254", 80),
        "another cloud's metadata": ("168.63.129.16", 80),
    }
    assert platform.opened(places, pod, "environment", HOME) == {"public", "bus"}
    assert platform.opened(places, "plain-trainer-0", "trainer", NAMESPACE) == {"bus", "trainer"}


def test_environment_code_gains_nothing_in_its_container(platform, pod):
    assert json.loads(platform.python(pod, "environment", data(__file__, "breakout"), namespace=HOME)) == [18, []]


def test_the_bus_opens_no_subject_of_others_to_a_stolen_credential(platform, pod):
    url = f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222"
    opened = platform.python(
        pod, "supervisor", data(__file__, "on_the_bus"), url, *rows(__file__, "tenancy_subjects"), namespace=HOME
    )
    assert json.loads(opened) == [OWN]


def test_a_job_starts_from_no_adapter_of_the_blob_store(platform):
    status = platform.ended(THIEF, HOME)
    assert (status["phase"], "adapter_config.json" in status["message"]) == ("Failed", True), status["message"]
    for job, namespace in ((JOB, HOME), (THIEF, HOME), (NEIGHBOUR, ELSEWHERE)):
        platform.kubectl("delete", "rljob", job, "-n", namespace, "--wait=false")
