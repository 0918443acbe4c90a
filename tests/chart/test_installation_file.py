"""What the chart tells the operator is what the operator understands, and what the release says otherwise agrees with it."""

from pathlib import Path

import pytest
import yaml
from tests.operator.objects import PLAIN
from tests.tables import rows

from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.checks import check_fit
from marlaas_operator.installation import Installation, load

from .conftest import CHART, Document


def find(documents: list[Document], kind: str, name: str) -> Document:
    return next(each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))


def installation(documents: list[Document], folder: Path) -> Installation:
    file = folder / "installation.yaml"
    file.write_text(find(documents, "ConfigMap", "marlaas-installation")["data"]["installation.yaml"])
    return load(file)


def test_the_bus_is_found_by_name_and_by_labels(render, tmp_path):
    documents = render("default")
    told = installation(documents, tmp_path)
    service = find(documents, "Service", "marlaas-nats")
    assert told.nats_url == f"nats://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:4222"
    assert told.nats_pod_selector.items() <= service["spec"]["selector"].items()


def test_a_change_of_it_restarts_the_operator(render):
    def checksum(*options: str) -> object:
        template = find(render("default", *options), "Deployment", "marlaas-operator")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/installation"]

    assert checksum() == checksum("--set", "orchestrator.replicas=2")
    assert checksum() != checksum("--set", "sandbox.runtimeClassName=gvisor")


@pytest.mark.parametrize(("values", "claim"), [("default", "marlaas-blobs"), ("bare", "adapters"), ("external", None)])
def test_blobs_lie_where_the_orchestrator_looks(render, tmp_path, values, claim):
    documents = render(values)
    told = installation(documents, tmp_path)
    pod = find(documents, "Deployment", "marlaas-orchestrator")["spec"]["template"]["spec"]
    mounted = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if each["name"] == "blobs"]
    assert told.blobs.claim_name == claim
    assert mounted == ([claim] if claim else [])
    assert f"--blobs={told.blobs.url}" in pod["containers"][0]["args"]


def test_the_notes_have_a_first_job_that_its_pool_can_take_and_say_what_uninstalling_keeps(helm):
    done = helm("install", "marlaas", CHART, "--namespace", "marlaas-system", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    manifests = [part.partition("<<END\n")[2].partition("  END")[0] for part in notes.split("kubectl")[1:]]
    pool_text, job_text = [text for text in manifests if text]
    pool, job = ModelPool.model_validate(yaml.safe_load(pool_text)), RLJob.model_validate(yaml.safe_load(job_text))
    assert job.spec.pool_ref.name == pool.metadata.name
    assert list(check_fit(job, pool)) == []
    told = " ".join(notes.split())
    assert "the claim data-marlaas-nats-0 (progress and records of the jobs), the claim marlaas-blobs (all" in told
    selector = "app.kubernetes.io/name=marlaas,app.kubernetes.io/instance=marlaas"
    assert f"delete persistentvolumeclaims --selector {selector}" in told


def test_a_file_that_is_not_there_no_yaml_or_not_understood_is_refused_with_its_place(tmp_path):
    file = tmp_path / "i.yaml"
    with pytest.raises(InvalidInput, match=r"i\.yaml"):
        load(file)
    changed = [(yaml.safe_dump({**PLAIN, **change}), words) for change, words in rows(__file__, "not_understood")]
    for text, words in (("{", r"i\.yaml"), *changed):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=words):
            load(file)
