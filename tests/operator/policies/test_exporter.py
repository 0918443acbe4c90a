"""The exporter of a job: when it is there, what the status says of it, and that nothing of it is taken for the job's own."""

from dataclasses import replace

import pytest
from tests.operator.policies import scenes

from marlaas_operator.manifests.exporter import Exporter, exporter_objects
from marlaas_operator.plan import Apply, Delete, DeleteObject
from marlaas_operator.policies.job import plan_job


def scene(job, owned=True, sandbox=True, **fields):
    """A running job that is to be reported, with its exporter."""
    exporter = Exporter(scenes.META, scenes.document(job), scenes.modelpool().spec.sandbox, "creds")
    if "progress" in fields and fields["progress"].phase == "Succeeded":
        exporter = replace(exporter, has_succeeded=True)
    made = exporter_objects(exporter, scenes.INSTALLATION) if owned else ()
    there = {scenes.key_of(one): scenes.stored(one) for one in made}
    both = {**(scenes.owned_sandbox(job) if sandbox else {}), **there}
    return scenes.running(**{"job": job, "exporter_credential": "creds", **fields, "owned": both})


def condition(plan):
    found = [one for one in (plan.status or {}).get("conditions", ()) if one["type"] == "Reporting"]
    return [(one["status"], one["reason"], one["message"]) for one in found]


@pytest.mark.parametrize(("fields", "acts", "status", "words"), scenes.scene_rows(__file__, "exporter"))
def test_the_exporter_is_there_while_it_has_something_to_report_and_the_status_tells(fields, acts, status, words):
    plan = plan_job(scene(**fields), scenes.INSTALLATION, scenes.NOW)
    did = [(type(one).__name__, one.manifest["kind"] if isinstance(one, Apply) else one.kind) for one in plan.aside]
    made = [("Apply", kind) for kind in ("ServiceAccount", "NetworkPolicy", "Secret", "Deployment")]
    assert did == {"makes": made, "keeps": [], "removes": [("Delete", "Deployment")]}[acts]
    assert [f"{one} {reason}" for one, reason, _ in condition(plan)] == ([status] if status else [])
    assert words in "".join(text for *_, text in condition(plan))
    assert not any(isinstance(one, Apply | Delete | DeleteObject) for one in plan.actions), (
        "the rest is as it should be"
    )
    assert (plan.status or {}).get("sandboxCrashes") is None
    listed = (plan.status or {}).get("trackers")
    assert listed in (None, [{"name": "mlflow", "url": "https://mlflow.example/#/runs/1"}])
    assert (listed is not None) == ("https://mlflow.example" in str(fields.get("report")))
