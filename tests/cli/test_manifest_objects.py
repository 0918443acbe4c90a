"""Files, objects, and what objects say of each other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.tables import rows

from marlaas.envs import BUILTINS
from marlaas.manifest import InvalidManifest, load
from marlaas_api.documents import job_document
from marlaas_api.messages import TenantQuota

Write = Callable[..., Path]
Complaints = Callable[..., list[str]]
Edit = str | tuple[str, str]

TENANT = "spec: {namespaces: [team-a]}"
TENANT_KIND = "apiVersion: marlaas.dev/v1alpha1\nkind: Tenant"


def _more_jobs(*names: str) -> str:
    text = "training: {steps: 3}"
    for name in names:
        job = f"apiVersion: marlaas.dev/v1alpha1\nkind: RLJob\nmetadata: {{name: {name}, namespace: team-a}}\nspec:\n"
        text += f"\n---\n{job}  poolRef: {{name: tiny}}\n  environment: {{name: reverse}}\n  training: {{steps: 4}}"
    return text


@pytest.mark.parametrize(("edit", "line"), rows(__file__, "objects"))
def test_what_does_not_go_together_is_told_with_line_and_numbers(complaints: Complaints, edit: Edit, line: str) -> None:
    assert complaints(edit) == [
        f"job.yaml:{line.replace('{here}', str(Path.cwd())).replace('{builtins}', ', '.join(BUILTINS))}"
    ]


def test_a_right_manifest_is_loaded_in_the_order_of_the_files(manifest: Write) -> None:
    loaded = load([manifest(_more_jobs("products"))])
    assert [pool.metadata.name for pool in loaded.pools] == ["tiny"]
    assert [tenant.metadata.name for tenant in loaded.tenants] == ["red"]
    assert [job.metadata.name for job in loaded.jobs] == ["sums", "products"]
    assert loaded.folders == (Path.cwd().resolve(),) * 2
    assert loaded.notes == ()


def test_a_cluster_may_have_the_pool_that_the_files_lack(manifest: Write, tmp_path: Path) -> None:
    job = manifest().read_text(encoding="utf-8").split("---\n")[2]
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    loaded = load(["job.yaml"], runnable=False)
    assert [str(note) for note in loaded.notes] == [
        "job.yaml:5: spec.poolRef.name: ModelPool 'tiny' is not in these files; the job is not checked against it"
    ]


TEAM = "environment: {name: relay}\n  agents: [{name: caller}, {name: reader, poolRef: {name: big}, adapter: {rank: 16, targets: [q_prj]}}]"
SECOND_POOL = "\n---\napiVersion: marlaas.dev/v1alpha1\nkind: ModelPool\nmetadata: {name: big}\nspec: {model: {builtin: tiny}, maxRank: 8, adapterSlots: 8}"


def test_each_agent_is_checked_against_its_own_pool_which_has_to_exist(complaints: Complaints, manifest: Write) -> None:
    last = "training: {steps: 3}"
    assert complaints(TEAM, (last, f"{last}{SECOND_POOL}")) == [
        "job.yaml:20: spec.agents[1].adapter.rank: rank 16 is above maxRank 8 of ModelPool 'big' of agent 'reader'; lower the rank or raise "
        "the pool's maxRank",
        "job.yaml:20: spec.agents[1].adapter.targets[0]: the builtin models have q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and "
        "down_proj, found 'q_prj'; did you mean 'q_proj'?",
    ]
    for pool, hint in (("big", "; add the file that defines it"), ("tyny", "; did you mean 'tiny'?")):
        team = TEAM.replace("name: big", f"name: {pool}").replace("q_prj", "q_proj")
        said = f"no ModelPool '{pool}' of agent 'reader' in these files{hint}"
        assert complaints(team) == [f"job.yaml:20: spec.agents[1].poolRef.name: {said}"]
    right = TEAM.replace("rank: 16", "rank: 8").replace("q_prj", "q_proj")
    loaded = load([manifest(right, (last, f"{last}{SECOND_POOL}"))])
    assert [str(note) for note in loaded.notes] == [], "the pool is used"
    assert job_document(loaded.jobs[0], (), "u1", None).pools == {"tiny", "big"}


@pytest.mark.parametrize("runnable", [True, False])
def test_an_amount_of_memory_in_which_nothing_runs_is_refused(complaints: Complaints, runnable: bool) -> None:
    edits = ("maxRank: 16\n  rollout: {kvCacheBytes: 512}", "environment: {name: reverse, memory: 512m}")
    assert complaints(*edits, runnable=runnable) == [
        "job.yaml:7: spec.rollout.kvCacheBytes: kvCacheBytes 512 is only 512 bytes; did you mean 512Mi?",
        "job.yaml:20: spec.environment.memory: memory 512m is only 0.512 bytes; did you mean 512Mi?",
    ]


def test_a_job_without_a_namespace_may_be_submitted_into_one_that_the_pool_is_for(complaints: Complaints) -> None:
    edits = ("maxRank: 16\n  namespaces: [team-a]", (", namespace: team-a}", "}"))
    assert complaints(*edits, runnable=False) == []
    (line,) = complaints(*edits)
    assert "namespace 'default' may not use ModelPool 'tiny', which allows only team-a" in line


def test_a_module_beside_the_manifest_is_noted_to_whoever_submits_it(manifest: Write, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text("def guess(task, agent):\n    return 0.0\n", encoding="utf-8")
    path = manifest("environment: {name: 'games:guess'}")
    (note,) = load([path], runnable=False).cluster_notes
    assert str(note).startswith(
        "job.yaml:19: spec.environment.name: a cluster's sandboxes look for 'games:guess' in the worker image"
    )
    assert load([path]).notes == ()


def test_a_tenants_weight_and_quota_are_in_its_jobs_documents(manifest: Write) -> None:
    quota = "{jobs: 1, adapterSlots: 2, tokensPerSecond: 3.5, trainerSecondsPerHour: 60, storage: 4Gi}"
    loaded = load([manifest((TENANT, f"spec: {{namespaces: [team-a], weight: 2, quota: {quota}}}"))])
    assert list(loaded.notes) == []
    document = job_document(loaded.jobs[0], loaded.tenants, "uid", None)
    assert document.tenant_weight == 2.0
    assert document.tenant_quota == TenantQuota(
        jobs=1, adapter_slots=2, tokens_per_second=3.5, trainer_seconds_per_hour=60.0, storage="4Gi"
    )
    assert job_document(loaded.jobs[0], (), "uid", None).tenant_quota == TenantQuota()


def test_lists_as_kubectl_prints_them_are_taken_apart_with_their_lines(manifest: Write) -> None:
    items = list(yaml.safe_load_all(manifest().read_text(encoding="utf-8")))
    items[2]["spec"]["training"]["stepz"] = 4
    items[0]["status"] = {"anything": True}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items}, sort_keys=False)
    Path("list.yaml").write_text(text, encoding="utf-8")
    line = text.splitlines().index("      stepz: 4") + 1
    with pytest.raises(InvalidManifest) as caught:
        load(["list.yaml"])
    assert str(caught.value) == f"list.yaml:{line}: spec.training.stepz: unknown field; did you mean 'steps'?"


def test_a_manifest_without_a_job_is_nothing_to_run(manifest: Write) -> None:
    path = manifest()
    path.write_text(path.read_text(encoding="utf-8").split("---\n")[0], encoding="utf-8")
    with pytest.raises(InvalidManifest, match=r"^no RLJob in job.yaml: nothing can be run$"):
        load([path])
    assert len(load([path], runnable=False).pools) == 1


def test_an_object_that_is_given_twice_word_for_word_is_refused_too(manifest: Write, tmp_path: Path) -> None:
    job = manifest().read_text(encoding="utf-8").split("---\n")[2]
    (tmp_path / "copy.yaml").write_text(job, encoding="utf-8")
    with pytest.raises(InvalidManifest, match=r"RLJob 'team-a/sums' is already defined at job.yaml:14"):
        load(["job.yaml", "copy.yaml"])


BIG = "apiVersion: marlaas.dev/v1alpha1\nkind: ModelPool\nmetadata: {name: big}\nspec: {model: {builtin: tiny}}"


@pytest.mark.parametrize(("edits", "notes"), rows(__file__, "notes"))
def test_what_is_right_and_may_surprise_is_noted(manifest: Write, edits: tuple[Edit, ...], notes: list[str]) -> None:
    assert [str(note) for note in load([manifest(*edits)]).notes] == [f"job.yaml:{note}" for note in notes]
