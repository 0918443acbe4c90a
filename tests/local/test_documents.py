from itertools import pairwise
from pathlib import Path

import pytest
from tests.models.model_folders import write_adapter, write_model
from tests.tables import data, rows

from marlaas.local.documents import CHANGEABLE, Resources, merge, pool_documents, read, refuse_other_models, scaled
from marlaas.manifest import load
from marlaas.models import inspect
from marlaas.models.cards import Card
from marlaas.models.memory import PoolUse, agent_rooms
from marlaas_api.documents import job_document, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob, Tenant
from marlaas_api.messages import PoolDocument, concerns_loop


def _object(kind, name, spec, **metadata):
    head = {"apiVersion": "marlaas.dev/v1alpha1", "kind": kind.__name__, "metadata": {"name": name, **metadata}}
    return kind.model_validate({**head, "spec": spec})


def _pool(builtin="tiny", **spec):
    return _object(ModelPool, "tiny", {"model": {"builtin": builtin}, **spec})


@pytest.mark.parametrize(("given", "expected"), [((None, None), (1, 3)), ((2, None), (2, 3)), ((2, 4), (2, 4))])
def test_the_numbers_of_workers_are_the_pools_own_unless_they_are_given(given, expected):
    (pool,) = scaled([_pool(trainer={"replicas": 3})], *given)
    assert (pool.spec.rollout.replicas, pool.spec.trainer.replicas) == expected


@pytest.mark.parametrize("free", [None, 0, 64 << 30])
def test_each_trainer_gets_its_part_of_the_free_memory_unless_it_measures_it_on_a_gpu(tmp_path, document, free):
    folder = write_model(tmp_path / "m", hidden_size=8, num_hidden_layers=2)
    other, jobs = _object(ModelPool, "other", {"model": {"builtin": "tiny"}}), [document()]
    pools = [_pool(trainer={"replicas": 2}), other]
    found = pool_documents(pools, [folder, folder], jobs, Resources(free))
    assert [(one.name, one.model_path) for one in found] == [("tiny", str(folder)), ("other", str(folder))]
    uses = [PoolUse(inspect(folder), pools[0].spec, [jobs[0].spec]), PoolUse(inspect(folder), pools[1].spec)]
    expected = [0, 0] if free is None else agent_rooms(uses, free)
    assert [one.agent_room_bytes for one in found] == expected


def test_workers_that_share_a_card_get_equal_parts_and_too_small_a_card_is_refused(tmp_path, document):
    folder, sizes = write_model(tmp_path / "m", hidden_size=8, num_hidden_layers=2), [Card(80 << 30, 40 << 30)]
    (found,) = pool_documents([_pool()], [folder], [document()], Resources(cards=sizes))
    halves = [int(found.spec.trainer.activation_bytes) / 2**30, found.agent_room_bytes / 2**30]
    assert halves == pytest.approx([0.75 * 17.2, 0.8 * 0.25 * 17.2], abs=0.1), "of 38 GiB, without graphs and contexts"
    with pytest.raises(InvalidInput, match=r"the workers need 3.8 GiB .* together, and 2.8 GiB may be used"):
        pool_documents([_pool()], [folder], [document()], Resources(cards=[Card(3 << 30, 3 << 30)]))


SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3, "seed": 5}}
JOB = _object(RLJob, "reverse", SPEC, namespace="team-a")


def test_a_document_has_the_tenant_of_its_namespace_or_the_namespace_with_weight_1_which_no_tenant_is():
    given = (("team-a", ["team-b"], 2), ("research", ["team-a", "team-c"], 3))
    tenants = [_object(Tenant, name, {"namespaces": names, "weight": weight}) for name, names, weight in given]
    document = job_document(JOB, tenants, "u", None)
    assert (document.tenant, document.tenant_weight) == ("research", 3)
    document = job_document(JOB, tenants[:1], "u", None)
    assert (document.tenant, document.tenant_weight) == ("tenant/default", 1.0)


@pytest.mark.parametrize(("given", "expected"), [(None, 5), (0, 0), (11, 11)])
def test_the_seed_is_the_manifests_own_unless_one_is_given(given, expected):
    assert job_document(JOB, [], "u", given).seed == expected


def test_a_job_that_is_taken_up_again_keeps_its_uid_generation_and_place_in_the_queue(document):
    before = document(uid="first", generation=4, created_at=3.0)
    assert merge([before], [document(uid="second", created_at=9.0)]) == (before,)


@pytest.mark.parametrize("change", rows(__file__, "changeable"))
def test_what_may_change_makes_a_new_generation_of_the_same_job(document, change):
    (merged,) = merge([document(uid="first")], [document(**change, uid="second")])
    assert (merged.uid, merged.generation) == ("first", 2)
    assert merged.spec == document(**change).spec


@pytest.mark.parametrize("change", [{"ttlSecondsAfterFinished": 60}, {"backoffLimit": 1}], ids=str)
def test_a_setting_that_no_worker_reads_is_not_in_the_document(document, change):
    assert merge([document()], [document(spec=change)]) == (document(),)


def test_the_jobs_of_a_run_queue_in_the_order_of_their_manifests():
    examples = Path(__file__).parents[2] / "examples"
    jobs = read([str(examples / "quickstart.yaml")], None).jobs
    assert len(jobs) > 1
    assert all(before.created_at < after.created_at for before, after in pairwise(jobs))


def test_a_run_is_continued_with_the_files_of_submit_which_name_its_pool_again(tmp_path):
    files = [tmp_path / name for name in ("first.yaml", "added.yaml", "other.yaml")]
    for file, setting in zip(files, ("", "", ", maxRank: 8"), strict=True):
        file.write_text(data(__file__, "pool_again") % (setting, file.stem))
    found = read([str(file) for file in files[:2]], None)
    assert ([pool.metadata.name for pool in found.pools], len(found.jobs)) == (["tiny"], 2)
    with pytest.raises(InvalidInput, match=r"other.yaml:3: metadata.name: ModelPool 'tiny' is already defined"):
        read([str(file) for file in files], None)


def test_paths_of_models_and_adapters_are_read_from_the_manifests_folder(tmp_path, monkeypatch):
    write_model(tmp_path / "project" / "m", {"model.layers.0.self_attn.q_proj.weight": (8, 8)})
    write_adapter(tmp_path / "project" / "a", '{"r": 8, "lora_alpha": 16}')
    file = tmp_path / "project" / "configs" / "job.yaml"
    file.parent.mkdir()
    file.write_text(data(__file__, "relative_paths"))
    monkeypatch.chdir(tmp_path)
    found = read(["project/configs/job.yaml"], None)
    assert found.pools[0].spec.model.path == str(tmp_path / "project" / "m")
    (agent,), kl = found.jobs[0].spec.agents, found.jobs[0].spec.training.kl
    assert agent.init_from.path == kl.reference.path == str(tmp_path / "project" / "a")
    assert load([file], runnable=False).pools[0].spec.model.path == "../m", "a cluster's manifest is not changed"


@pytest.mark.parametrize(("change", "concerns"), rows(__file__, "loop"), ids=str)
def test_only_a_change_of_what_is_played_or_trained_concerns_the_loop(document, change, concerns):
    assert concerns_loop(document(), document(**change)) is concerns


def test_of_what_may_change_while_a_job_runs_only_the_number_of_steps_concerns_its_loop():
    others = {"priority", "suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"}
    assert others == CHANGEABLE - {"training.steps"}


@pytest.mark.parametrize(("change", "words"), rows(__file__, "fixed"))
def test_what_must_not_change_is_refused_by_the_name_of_its_field(document, change, words):
    with pytest.raises(InvalidInput) as refused:
        merge([document()], [document(spec=change)])
    assert words in str(refused.value)
    assert "team-a/reverse" in str(refused.value)


def test_another_seed_another_base_model_and_a_missing_job_are_refused(document):
    with pytest.raises(InvalidInput, match="seed was 0 and is now 9"):
        merge([document()], [document(seed=9)])
    with pytest.raises(InvalidInput, match="job team-a/other was started in this output folder"):
        merge([document("other")], [document()])
    stored = PoolDocument(name="tiny", model_path="/models/tiny", spec=pool_spec(_pool().spec))
    refuse_other_models([stored], [_pool(maxRank=8)])
    with pytest.raises(InvalidInput, match=r"ModelPool tiny: spec\.model has changed"):
        refuse_other_models([stored], [_pool("smollm2-135m-instruct")])
