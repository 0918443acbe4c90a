"""What holds of every pod of the chart, beyond the restricted level of Pod Security, at which the scenarios of e2e install it."""

from collections.abc import Iterator

from tests.operator.manifests.pod_rules import beyond, holds_token

from .conftest import Document


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] == "Pod":
            yield name, document["spec"]
        elif document["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield name, document["spec"]["template"]["spec"]


def test_every_pod_keeps_our_own_rules_with_bounded_memory(documents):
    for name, pod in pods(documents):
        assert beyond(pod) == [], name
        assert all("memory" in each["resources"]["limits"] for each in pod["containers"]), name


def test_only_those_who_ask_the_api_server_hold_a_token(documents):
    holders = {name for name, pod in pods(documents) if holds_token(pod)}
    assert holders <= {"Deployment marlaas-operator", "Job marlaas-uninstall", "Pod marlaas-test"}
    accounts = [pod["serviceAccountName"] for _, pod in pods(documents)]
    made = {document["metadata"]["name"] for document in documents if document["kind"] == "ServiceAccount"}
    assert len(accounts) == len(made), "each has an account of its own"
    assert set(accounts) == made


def test_long_running_pods_are_probed_fenced_and_selected_by_labels_that_stay(documents):
    fences = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    fenced = [spec["podSelector"]["matchLabels"] for spec in fences]
    assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in fences)
    for spec in [each["spec"] for each in documents if each["kind"] in {"Deployment", "StatefulSet"}]:
        template, selector = spec["template"], spec["selector"]["matchLabels"]
        for container in template["spec"]["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
        assert selector in fenced
        claims = [each["metadata"]["labels"] for each in spec.get("volumeClaimTemplates", [])]
        for labels in (selector, template["metadata"]["labels"], *claims):
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)
