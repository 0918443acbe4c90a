"""Who may do what: no wildcard anywhere, no Secret read but the bus's, and the aggregated roles."""

from collections.abc import Iterator

from .conftest import Document, Render

WRITE = {"create", "update", "patch", "delete", "deletecollection"}


def rules(documents: list[Document], kind: str = "") -> Iterator[tuple[str, Document]]:
    for document in documents:
        if document["kind"] in ({kind} if kind else {"Role", "ClusterRole"}):
            for rule in document["rules"]:
                yield document["metadata"]["name"], rule


def test_there_is_no_wildcard_and_nobody_may_grant_rights_or_act_as_others(documents: list[Document]) -> None:
    for _, rule in rules(documents):
        assert not any("*" in entry for entries in rule.values() for entry in entries)
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
        assert "rbac.authorization.k8s.io" not in rule["apiGroups"]


def test_the_only_secret_that_can_be_read_is_the_buss(documents: list[Document]) -> None:
    for name, rule in rules(documents):
        if "secrets" in rule["resources"] and {"get", "list", "watch"} & set(rule["verbs"]):
            assert name == "marlaas-operator"
            assert rule["resourceNames"] in (["marlaas-bus"], ["bus-credentials"])
            assert rule["verbs"] == ["get", "patch"]


def test_no_pod_can_be_made_or_entered(documents: list[Document]) -> None:
    for _, rule in rules(documents):
        assert not {"pods/exec", "pods/attach", "pods/portforward", "nodes", "serviceaccounts/token"} & set(
            rule["resources"]
        )
        if "pods" in rule["resources"]:
            assert not WRITE & set(rule["verbs"])


def test_outside_the_releases_namespace_the_operator_writes_only_what_a_sandbox_is_made_of(render: Render) -> None:
    written = {
        resource
        for name, rule in rules(render("default"), "ClusterRole")
        if name == "marlaas-operator" and WRITE & set(rule["verbs"])
        for resource in rule["resources"]
    }
    kinds = {"rljobs", "modelpools", "tenants", "rljobs/finalizers", "modelpools/finalizers"}
    statuses = {"rljobs/status", "modelpools/status", "tenants/status"}
    assert written - kinds - statuses == {"deployments", "networkpolicies", "serviceaccounts", "secrets", "events"}


def test_editors_and_viewers_of_a_namespace_are_that_of_its_rljobs_and_of_nothing_else(render: Render) -> None:
    aggregated = {}
    for document in render("default"):
        labels = document["metadata"].get("labels", {})
        targets = sorted(key.removeprefix("rbac.authorization.k8s.io/") for key in labels if "aggregate-to" in key)
        if targets:
            resources = sorted({resource for rule in document["rules"] for resource in rule["resources"]})
            aggregated[document["metadata"]["name"]] = (targets, resources)
    assert aggregated == {
        "marlaas-rljob-editor": (["aggregate-to-admin", "aggregate-to-edit"], ["rljobs", "rljobs/status"]),
        "marlaas-rljob-viewer": (["aggregate-to-view"], ["rljobs", "rljobs/status"]),
        "marlaas-platform-viewer": (
            ["aggregate-to-view"],
            ["modelpools", "modelpools/status", "tenants", "tenants/status"],
        ),
    }


def test_nobody_but_the_operator_writes_a_status(documents: list[Document]) -> None:
    for name, rule in rules(documents):
        if WRITE & set(rule["verbs"]) and any(
            resource.endswith(("/status", "/finalizers")) for resource in rule["resources"]
        ):
            assert name == "marlaas-operator"


def test_everybody_may_see_the_pools_unless_the_platform_says_otherwise(render: Render) -> None:
    def open_to_all(documents: list[Document]) -> list[str]:
        bindings = [document for document in documents if document["kind"] == "ClusterRoleBinding"]
        return [each["roleRef"]["name"] for each in bindings if each["subjects"][0]["kind"] == "Group"]

    assert open_to_all(render("default")) == ["marlaas-modelpool-viewer"]
    assert open_to_all(render("bare")) == []
