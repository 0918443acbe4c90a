"""Who may do what: no wildcard anywhere, no Secret read but the bus's, and the aggregated roles."""

from collections.abc import Iterator

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
    written = {
        resource
        for name, rule in rules(render("default"), "ClusterRole")
        if name == "marlaas-operator" and WRITE & set(rule["verbs"])
        for resource in rule["resources"]
    }
    kinds = {"rljobs", "modelpools", "tenants", "rljobs/finalizers", "modelpools/finalizers"}
    statuses = {"rljobs/status", "modelpools/status", "tenants/status"}
    assert written - kinds - statuses == {"deployments", "networkpolicies", "serviceaccounts", "secrets", "events"}
