"""An object is applied again when what we set is no longer so, and only then; written as YAML, as people see it."""

import copy

import pytest
from tests.tables import data, rows

from marlaas_operator.manifests.pods import stamped
from marlaas_operator.policies.child_reconcile import differs

DESIRED = stamped(data(__file__, "desired"))


def observed(edit=""):
    """As the server gives it back (defaults filled in, empties left out, quantities spelled its way), and then edited."""
    body = copy.deepcopy(dict(DESIRED))
    spec, pod = body["spec"], body["spec"]["template"]["spec"]
    del spec["paused"], spec["ingress"]
    spec["progressDeadlineSeconds"] = 600
    pod["restartPolicy"] = "Always"
    container = pod["containers"][0]
    container |= {"imagePullPolicy": "IfNotPresent", "terminationMessagePath": "/dev/termination-log"}
    container["resources"]["requests"] = {"cpu": "1", "memory": "1Gi"}
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "1024Mi"
    body["metadata"]["resourceVersion"] = "7"
    exec(edit, {"body": body, "spec": spec, "pod": pod, "container": container})
    return body


def test_an_absent_object_differs():
    assert differs(DESIRED, None)


@pytest.mark.parametrize("edit", rows(__file__, "no_drift"))
def test_how_the_server_spells_it_and_what_others_add_is_no_drift(edit):
    assert not differs(DESIRED, observed(edit))


@pytest.mark.parametrize("edit", rows(__file__, "drift"))
def test_what_was_changed_of_ours_is_drift(edit):
    assert differs(DESIRED, observed(edit))
