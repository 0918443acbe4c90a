"""Who may do what: no wildcard, no Secret read but the bus's, the aggregated roles; and what holds of every pod, beyond the restricted level of Pod Security."""

from collections.abc import Iterator

from tests.operator.manifests.cases import beyond, holds_token

from .conftest import Document

WRITE = {"create", "update", "patch", "delete", "deletecollection"}


def rules(documents: list[Document], kind: str = "") -> Iterator[tuple[str, Document]]:
    for document in documents:
        if document["kind"] in ({kind} if kind else {"Role", "ClusterRole"}):
            for rule in document["rules"]:
                yield document["metadata"]["name"], rule


def test_no_rule_has_a_wildcard_grants_rights_makes_pods_or_reads_foreign_secrets(documents):
    for name, rule in rules(documents):
        verbs, resources = set(rule["verbs"]), set(rule["resources"])
        assert not any("*" in entry for entries in rule.values() for entry in entries)
        assert not {"escalate", "bind", "impersonate"} & verbs
        assert "rbac.authorization.k8s.io" not in rule["apiGroups"]
        assert not {"pods/exec", "pods/attach", "pods/portforward", "nodes", "serviceaccounts/token"} & resources
        assert "pods" not in resources or not WRITE & verbs
        if "secrets" in resources and {"get", "list", "watch"} & verbs:
            assert name == "marlaas-operator"
            assert rule["resourceNames"] in (["marlaas-bus"], ["bus-credentials"])
            assert rule["verbs"] == ["get", "patch"]
        if WRITE & verbs and any(resource.endswith(("/status", "/finalizers")) for resource in resources):
            assert name == "marlaas-operator"


def test_outside_the_releases_namespace_the_operator_writes_only_what_a_sandbox_is_made_of(render):
    own = [rule for name, rule in rules(render("default"), "ClusterRole") if name == "marlaas-operator"]
    written = {resource for rule in own if WRITE & set(rule["verbs"]) for resource in rule["resources"]}
    kinds = {"rljobs", "modelpools", "tenants", "rljobs/finalizers", "modelpools/finalizers"}
    statuses = {"rljobs/status", "modelpools/status", "tenants/status"}
    assert written - kinds - statuses == {"deployments", "networkpolicies", "serviceaccounts", "secrets", "events"}


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
