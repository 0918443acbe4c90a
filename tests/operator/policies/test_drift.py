"""An object is applied again when what we set is no longer so, and only then; written as YAML, as people see it."""

import copy

import pytest
import yaml

from marlaas_operator.manifests.pods import stamped
from marlaas_operator.policies.child_reconcile import differs

DESIRED = stamped(
    yaml.safe_load("""
kind: Deployment
metadata: {name: d, labels: {a: b}, ownerReferences: [{kind: RLJob, uid: u1, controller: true}]}
spec:
  replicas: 2
  paused: false
  template:
    spec:
      automountServiceAccountToken: false
      containers:
      - name: main
        image: w:1
        command: [a, b]
        env: [{name: A, value: "1"}, {name: B, value: "1"}]
        resources: {requests: {cpu: 1000m, memory: "1073741824"}, limits: {nvidia.com/gpu: "1"}}
        volumeMounts: [{name: v, mountPath: /v}]
      volumes: [{name: v, emptyDir: {sizeLimit: 1Gi}}]
      tolerations: [{key: gpu, operator: Exists}]
  ingress: []
""")
)


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


@pytest.mark.parametrize(
    "edit",
    [
        "",
        "body['metadata']['labels']['theirs'] = 'x'",
        "body['metadata']['annotations']['theirs'] = 'x'",
        "pod['containers'].append({'name': 'sidecar', 'image': 'proxy'})",
        "pod['containers'].reverse()",
        "container['env'].insert(0, {'name': 'THEIRS', 'value': 'x'})",
        "pod['volumes'].append({'name': 'theirs', 'emptyDir': {}})",
        "spec['paused'] = False",
        "spec['ingress'] = []",
        "body['status'] = {'readyReplicas': 1}",
    ],
)
def test_how_the_server_spells_it_and_what_others_add_is_no_drift(edit):
    assert not differs(DESIRED, observed(edit))


@pytest.mark.parametrize(
    "edit",
    [
        "spec['replicas'] = 0",
        "spec['paused'] = True",
        "spec['ingress'] = [{}]",
        "pod['automountServiceAccountToken'] = True",
        "del pod['automountServiceAccountToken']; pod['automountServiceAccountToken'] = None; pod['x'] = spec.pop('replicas')",
        "container['image'] = 'w:2'",
        "container['command'] = ['a']",
        "container['command'] = ['a', 'b', 'c']",
        "container['env'][0]['value'] = '2'",
        "container['env'].pop()",
        "container['env'][0]['value'] = '1.0'",
        "container['resources']['requests']['cpu'] = '2'",
        "container['resources']['limits'] = {}",
        "container['volumeMounts'][0]['mountPath'] = '/elsewhere'",
        "pod['containers'] = [{'name': 'other'}]",
        "pod['volumes'][0]['emptyDir']['sizeLimit'] = '2Gi'",
        "pod['tolerations'] = []",
        "body['metadata']['labels']['a'] = 'c'",
        "body['metadata']['ownerReferences'] = []",
        "body['metadata']['annotations']['marlaas.dev/desired-hash'] = 'older'",
        "body['metadata']['annotations'] = None",
        "del body['spec']",
    ],
)
def test_what_was_changed_of_ours_is_drift(edit):
    assert differs(DESIRED, observed(edit))
