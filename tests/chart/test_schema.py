"""values.schema.json: what a typing error in values gets to read. Read as documentation: setting, then where and why it is refused."""

import re

import pytest
import yaml

from .conftest import CHART, VALUES, Helm

REFUSED = [
    # a name that does not exist
    ("opertor.image=x", "at '': additional properties 'opertor' not allowed"),
    ("operator.imge=x", "at '/operator': additional properties 'imge' not allowed"),
    ("operator.replicas=2", "at '/operator': additional properties 'replicas' not allowed"),
    ("crds.retain=true", "at '/crds': additional properties 'retain' not allowed"),
    ("nats.storage.class=fast", "at '/nats/storage': additional properties 'class' not allowed"),
    ("operator.resources.request.cpu=1", "at '/operator/resources': additional properties 'request' not allowed"),
    ("network.metricsFrom[0].pods=x", "at '/network/metricsFrom/0': additional properties 'pods' not allowed"),
    # of the wrong kind
    ("crds.install=maybe", "at '/crds/install': got string, want boolean"),
    ("orchestrator.replicas=two", "at '/orchestrator/replicas': got string, want integer"),
    ("operator.nodeSelector=ssd", "at '/operator/nodeSelector': got string, want object"),
    ("imagePullSecrets=login", "at '/imagePullSecrets': got string, want array"),
    # out of bounds, or no such value
    ("orchestrator.replicas=11", "at '/orchestrator/replicas': maximum: got 11, want 10"),
    ("priorityClass.value=2000000000", "at '/priorityClass/value': maximum: got 2×10⁰⁹, want 1×10⁰⁹"),
    ("network.apiServerPorts={70000}", "at '/network/apiServerPorts/0': maximum: got 70,000, want 65,535"),
    ("logLevel=info", "at '/logLevel': value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
    ("imagePullPolicy=Sometimes", "at '/imagePullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"),
    (
        "blobs.persistentVolumeClaim.accessModes={ReadOnlyMany}",
        "at '/blobs/persistentVolumeClaim/accessModes/0': value must be one of",
    ),
    # not in the right form
    ("nats.storage.size=20GB", "at '/nats/storage/size': '20GB' does not match pattern"),
    (
        "blobs.persistentVolumeClaim.existing=My_Claim",
        "at '/blobs/persistentVolumeClaim/existing': 'My_Claim' does not match pattern",
    ),
    ("network.dnsCidrs={10.0.0.1}", "at '/network/dnsCidrs/0': '10.0.0.1' does not match pattern"),
    ("blobs.url=/var/lib/blobs", "at '/blobs/url': '/var/lib/blobs' does not match pattern"),
    (
        "nats.external.url=bus.example.com:4222",
        "at '/nats/external/url': 'bus.example.com:4222' does not match pattern",
    ),
    (
        "worker.pythonEnvironment.mountPath=opt",
        "at '/worker/pythonEnvironment/mountPath': 'opt' does not match pattern",
    ),
    ("nats.image=", "at '/nats/image': '' does not match pattern"),
    # what only fits together
    ("nats.external.url=tls://bus.example.com", "at '/nats/external/credsSecret': minLength: got 0, want 1"),
    ("nats.external.url=tls://bus.example.com", "at '/nats/external/cidrs': minItems: got 0, want 1"),
    ("nats.external.credsSecret=bus", "at '/nats/external/credsSecret': value must be ''"),
]


@pytest.mark.parametrize(("setting", "sentence"), REFUSED)
def test_a_value_that_cannot_be_meant_is_refused(helm: Helm, setting: str, sentence: str) -> None:
    done = helm("template", "marlaas", CHART, "--set", setting)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_release_name_that_makes_labels_too_long_is_refused(helm: Helm) -> None:
    assert helm("template", "m" * 40, CHART).returncode == 0
    assert "longer than 40 characters" in helm("template", "m" * 41, CHART).stderr


def test_values_of_the_wrong_release_are_refused_by_lint_too(helm: Helm) -> None:
    done = helm("lint", CHART, "--set", "operator.imge=x")
    assert done.returncode != 0
    assert "additional properties 'imge' not allowed" in done.stdout + done.stderr


@pytest.mark.parametrize("values", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_lint_finds_nothing(helm: Helm, values: str) -> None:
    done = helm("lint", "--strict", CHART, "--values", VALUES / f"{values}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_whole_chart_can_be_packaged(helm: Helm, tmp_path: object) -> None:
    done = helm("package", CHART, "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr


LINE = re.compile(r"^( *)(- )?([A-Za-z]+):")


def undocumented(text: str) -> list[str]:
    """Values that have neither a comment straight above nor values of their own below."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        key = LINE.match(line)
        opens = key is not None and line.rstrip().endswith(f"{key[3]}:")
        above = lines[number - 1].strip() if number else ""
        if key and not opens and not above.startswith("#"):
            found.append(line.strip())
    return found


def test_every_value_is_explained_where_it_stands() -> None:
    text = (CHART / "values.yaml").read_text()
    # requests and limits are Kubernetes' own words, below an explained `resources`
    within = [line for line in undocumented(text) if not line.startswith(("requests:", "limits:"))]
    assert within == []


def test_the_schema_and_the_values_name_the_same_things() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert names_of_schema(schema) - {"global"} == names_of_values(values, schema)


def names_of_schema(schema: dict[str, object], prefix: str = "") -> set[str]:
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    found: set[str] = set()
    for key, value in properties.items():
        below = names_of_schema(value, f"{prefix}{key}.") if "properties" in value else set()
        found |= below or {f"{prefix}{key}"}
    return found


def names_of_values(values: dict[str, object], schema: dict[str, object], prefix: str = "") -> set[str]:
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    found: set[str] = set()
    for key, value in values.items():
        inner = properties.get(key, {})
        if isinstance(value, dict) and "properties" in inner:
            found |= names_of_values(value, inner, f"{prefix}{key}.")
        else:
            found.add(f"{prefix}{key}")
    return found
