"""What the chart may tell the operator."""

import pytest
import yaml

from marlaas_api.errors import InvalidInput
from marlaas_operator.installation import load

PLAIN = """
release: marlaas
namespace: marlaas-system
natsUrl: nats://marlaas-nats.marlaas-system.svc:4222
natsPodSelector: {app.kubernetes.io/component: nats, app.kubernetes.io/instance: marlaas}
natsCidrs: []
busSecret: marlaas-bus
blobs: {url: "file:///var/lib/marlaas/blobs", claimName: marlaas-blobs, secretName: null}
workerImage: {name: "registry.example/w:1", pullPolicy: IfNotPresent, pullSecrets: []}
pythonEnvironment: null
modelCache: {claimName: null}
dnsCidrs: [192.0.2.1/32]
sandbox: {runtimeClassName: null, defaultCpu: "100m"}
logLevel: INFO
"""


def test_the_file_of_the_plan_is_read(tmp_path):
    (tmp_path / "i.yaml").write_text(PLAIN)
    found = load(tmp_path / "i.yaml")
    assert (found.release, found.worker_image.name, found.dns_cidrs) == (
        "marlaas",
        "registry.example/w:1",
        ("192.0.2.1/32",),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"natsURL": "x"}, "natsURL"), ({"logLevel": "LOUD"}, "logLevel"), ({"blobs": {}}, "blobs.url")],
)
def test_what_is_not_understood_is_refused_with_its_place(tmp_path, change, words):
    (tmp_path / "i.yaml").write_text(yaml.safe_dump({**yaml.safe_load(PLAIN), **change}))
    with pytest.raises(InvalidInput, match=words):
        load(tmp_path / "i.yaml")


def test_a_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"i\.yaml"):
        load(tmp_path / "i.yaml")
    (tmp_path / "i.yaml").write_text("{")
    with pytest.raises(InvalidInput, match=r"i\.yaml"):
        load(tmp_path / "i.yaml")
