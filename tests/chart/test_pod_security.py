"""Every pod of the chart passes the restricted Pod Security level, by the level's own list of rules, and a little more."""

from collections.abc import Callable, Iterator

import pytest

from .conftest import Document

SAFE_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] == "Pod":
            yield name, document["spec"]
        elif document["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield name, document["spec"]["template"]["spec"]


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"], *pod.get("ephemeralContainers", [])]


def contexts(pod: Document) -> list[Document]:
    return [pod.get("securityContext", {}), *(each.get("securityContext", {}) for each in containers(pod))]


def host_namespaces(pod: Document) -> bool:
    return not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))


def privileged(pod: Document) -> bool:
    return not any(each.get("securityContext", {}).get("privileged") for each in containers(pod))


def capabilities(pod: Document) -> bool:
    given = [each["securityContext"]["capabilities"] for each in containers(pod)]
    return all(each["drop"] == ["ALL"] and set(each.get("add", [])) <= {"NET_BIND_SERVICE"} for each in given)


def volumes(pod: Document) -> bool:
    return all(set(volume) - {"name"} <= SAFE_VOLUMES for volume in pod.get("volumes", []))


def host_ports(pod: Document) -> bool:
    return not any(port.get("hostPort") for each in containers(pod) for port in each.get("ports", []))


def escalation(pod: Document) -> bool:
    return all(each["securityContext"]["allowPrivilegeEscalation"] is False for each in containers(pod))


def never_root(pod: Document) -> bool:
    return pod["securityContext"]["runAsNonRoot"] is True and all(each.get("runAsUser") != 0 for each in contexts(pod))


def seccomp(pod: Document) -> bool:
    return bool(pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"})


def no_other_profiles(pod: Document) -> bool:
    names = {"seLinuxOptions", "windowsOptions", "procMount", "appArmorProfile", "sysctls"}
    return not any(names & set(each) for each in contexts(pod))


def read_only_root(pod: Document) -> bool:
    return all(each["securityContext"]["readOnlyRootFilesystem"] is True for each in containers(pod))


def bounded(pod: Document) -> bool:
    return all("memory" in each["resources"]["limits"] for each in containers(pod))


def last_words_kept(pod: Document) -> bool:
    return all(each["terminationMessagePolicy"] == "FallbackToLogsOnError" for each in containers(pod))


RULES = [
    host_namespaces,
    privileged,
    capabilities,
    volumes,
    host_ports,
    escalation,
    never_root,
    seccomp,
    no_other_profiles,
    read_only_root,
    bounded,
    last_words_kept,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.__name__))
def test_every_pod_obeys(documents: list[Document], rule: Callable[[Document], bool]) -> None:
    broken = [name for name, pod in pods(documents) if not rule(pod)]
    assert broken == []


def test_only_those_who_ask_the_api_server_hold_a_token(documents: list[Document]) -> None:
    holders = {name for name, pod in pods(documents) if pod.get("automountServiceAccountToken") is not False}
    assert holders <= {"Deployment marlaas-operator", "Job marlaas-uninstall", "Pod marlaas-test"}


def test_every_pod_has_an_account_of_its_own(documents: list[Document]) -> None:
    accounts = [pod["serviceAccountName"] for _, pod in pods(documents)]
    made = {document["metadata"]["name"] for document in documents if document["kind"] == "ServiceAccount"}
    assert len(set(accounts)) == len(accounts)
    assert set(accounts) == made


def test_long_running_pods_are_probed(documents: list[Document]) -> None:
    workloads = [document for document in documents if document["kind"] in {"Deployment", "StatefulSet"}]
    for workload in workloads:
        for container in workload["spec"]["template"]["spec"]["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def test_long_running_pods_are_fenced_by_a_network_policy(documents: list[Document]) -> None:
    fenced = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    selectors = [spec["podSelector"]["matchLabels"] for spec in fenced]
    assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in fenced)
    for document in documents:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            assert document["spec"]["selector"]["matchLabels"] in selectors


def test_a_label_that_an_upgrade_changes_selects_nothing(documents: list[Document]) -> None:
    for document in documents:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            spec = document["spec"]
            claims = [each["metadata"]["labels"] for each in spec.get("volumeClaimTemplates", [])]
            for labels in (spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"], *claims):
                assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)
