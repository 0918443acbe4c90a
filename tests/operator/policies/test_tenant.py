"""A namespace belongs to one tenant, the older; both are told."""

from dataclasses import replace

from tests.operator.policies.scenes import AWAKE, INSTALLATION, NOW, document, load, tenant
from tests.tables import data

from marlaas_api.kinds.status import TenantStatus
from marlaas_api.messages import Phase, TenantUsage, UsageAmounts
from marlaas_api.usage_objects import marks_of, usage_amounts
from marlaas_operator.plan import Delete, Plan
from marlaas_operator.policies import tenant as policy
from marlaas_operator.policies.job import plan_orphan
from marlaas_operator.snapshot import Meta, TenantSnapshot, by_precedence
from marlaas_operator.tenancy import ListedTenant, Tenancy

OLD, YOUNG = tenant("zoo", "team-a"), tenant("ant", "team-a", "team-b")
META = Meta(name="ant", uid="t2", created_at=200)
TENANTS = (META, YOUNG), (Meta(name="zoo", uid="t1", created_at=100), OLD)


def scene(**fields):
    return TenantSnapshot(**{"meta": META, "bus": AWAKE, "tenant": YOUNG, **fields})


def tenancy(*pairs):
    return Tenancy(ListedTenant(meta, one.spec.namespaces, one) for meta, one in pairs)


def plan_tenant(snapshot, now):
    return policy.plan_tenant(snapshot, INSTALLATION, now)


def active(found):
    [condition] = found.status["conditions"]
    return condition["status"], condition["reason"], condition["message"]


def test_the_older_of_two_tenants_of_a_namespace_has_it_or_the_first_by_name_and_the_other_is_told():
    found = tenancy(*TENANTS)
    assert [found.owner(one) for one in ("team-a", "team-b", "team-c")] == [OLD, YOUNG, None]
    assert (found.namespaces("zoo"), found.namespaces("ant")) == (("team-a",), ("team-b",))
    twins = [(Meta(name=name, uid=name, created_at=1), tenant(name, "x")) for name in ("b", "a")]
    assert [each.metadata.name for each in by_precedence(twins)] == ["a", "b"]
    found = plan_tenant(scene(lost={"team-a": "zoo"}), NOW)
    message = "namespace 'team-a' belongs to Tenant 'zoo', which is older; remove it from one of them"
    assert active(found) == ("False", "ConflictingTenants", message)
    assert [(event.type, event.reason) for event in found.events] == [("Warning", "ConflictingTenants")]


def test_a_tenant_counts_its_jobs():
    queued = load("b", Phase.QUEUED, namespace="team-b")
    ended = load("c", Phase.SUCCEEDED, namespace="team-b")
    jobs = (load("a", namespace="team-b", tokens_per_s=10.4, stored_bytes=5), queued, replace(ended, stored_bytes=7))
    weights = {"ant": 1.0, "zoo": 1.0, "tenant/default": 1.0}
    found = plan_tenant(scene(jobs=jobs, weights=weights, places={"tiny": 12}), NOW).status
    others = ("conditions", "observedGeneration", "usageHistory")
    figures = {key: value for key, value in found.items() if key not in others}
    shares = {"shareEntitled": 0.33, "shareHeld": 0.25}
    assert figures == {"jobs": 1, "queued": 1, "adapterSlots": 3, "tokensPerSecond": 10.0, "storageBytes": 12, **shares}
    TenantStatus.model_validate(found)


def test_all_namespaces_without_a_tenant_have_one_share_together():
    heavy = tenant("ant", "team-b", weight=3)
    weights = tenancy((META, heavy)).weights(["team-b", "ant", *(f"forged-{number}" for number in range(10))])
    assert weights == {"ant": 3.0, "tenant/default": 1.0}
    assert plan_tenant(scene(tenant=heavy, weights=weights), NOW).status["shareEntitled"] == 0.75


def test_a_tenant_shows_its_total_usage_and_keeps_it_while_the_bus_has_none():
    cut = {"preempted_tokens": 2, "engine_s": 5.0, "preempted_engine_s": 1.5}
    used = UsageAmounts(generated_tokens=9, trained_tokens=4, failed_tokens=3, **cut, trainer_s=1.26, stored_bytes=9)
    usage = TenantUsage(tenant="ant", total=used, removed=UsageAmounts(trainer_s=1))
    found = plan_tenant(scene(usage=usage), NOW).status
    shown = data(__file__, "tenant_usage")
    assert (found["usage"], found["deletedUsage"]) == (shown, {"trainerSeconds": 1.0})
    status = TenantStatus.model_validate(found)
    assert usage_amounts(status.usage) == used.model_copy(update={"trainer_s": 1.3})
    assert plan_tenant(scene(status=found), NOW).status is None


def with_usage(tokens, owned=None):
    used = UsageAmounts(generated_tokens=tokens, trained_tokens=tokens)
    return scene(usage=TenantUsage(tenant="ant", total=used), owned=owned or {})


def test_a_tenants_total_is_marked_once_an_hour_in_a_configmap_that_its_status_names():
    found = plan_tenant(with_usage(7), NOW)
    [apply] = found.actions
    meta = apply.manifest["metadata"]
    assert found.status["usageHistory"] == f"{meta['namespace']}/{meta['name']}" == "marlaas-system/ant-usage"
    assert meta["ownerReferences"][0]["uid"] == META.uid
    assert found.requeue_s == 3600 - NOW % 3600
    owned = {("ConfigMap", "ant-usage"): apply.manifest}
    assert plan_tenant(with_usage(8, owned), NOW + found.requeue_s - 1).actions == ()
    [later] = plan_tenant(with_usage(9, owned), NOW + found.requeue_s).actions
    marks = marks_of(later.manifest["data"])
    assert [(mark.at, mark.amounts.trained_tokens) for mark in marks] == [(NOW, 7), (NOW + found.requeue_s, 9)]


def test_a_new_tenants_history_begins_with_zeros_and_nothing_is_marked_while_the_usage_is_unknown():
    found = plan_tenant(scene(), NOW)
    [mark] = marks_of(found.actions[0].manifest["data"])
    assert (mark.at, mark.amounts) == (NOW, UsageAmounts())
    assert (found.status["usageHistory"], "usage" in found.status) == ("marlaas-system/ant-usage", False)
    told = plan_tenant(with_usage(7), NOW).status
    assert plan_tenant(scene(status=told), NOW) == Plan()
    unread = replace(with_usage(7), bus=replace(AWAKE, synced=False))
    assert plan_tenant(unread, NOW).actions == ()
    assert plan_tenant(replace(unread, status=told), NOW).status is None


def test_the_history_of_an_earlier_tenant_of_the_name_is_deleted_first():
    [apply] = plan_tenant(with_usage(7), NOW).actions
    owner = [{**apply.manifest["metadata"]["ownerReferences"][0], "uid": "earlier"}]
    foreign = {**apply.manifest, "metadata": {**apply.manifest["metadata"], "ownerReferences": owner, "uid": "c1"}}
    found = plan_tenant(with_usage(7, {("ConfigMap", "ant-usage"): foreign}), NOW)
    assert found.actions == (Delete("ConfigMap", "marlaas-system", "ant-usage", "c1"),)


def test_a_tenant_without_conflict_is_active_and_then_nothing_is_written():
    alone = scene()
    found = plan_tenant(alone, NOW)
    assert active(found)[:2] == ("True", "Active")
    owned = {("ConfigMap", "ant-usage"): found.actions[0].manifest}
    again = plan_tenant(replace(alone, status=found.status, owned=owned), NOW + 99)
    assert again == Plan(requeue_s=found.requeue_s - 99)


def test_a_tenant_that_is_going_or_does_not_parse():
    assert plan_tenant(scene(meta=replace(META, deleted_at=NOW)), NOW) == Plan()
    unread = plan_tenant(scene(tenant=None, problem="spec: required"), NOW)
    assert active(unread)[1:] == ("InvalidSpec", "spec: required")


def test_a_document_without_a_job_is_marked_deleted_once():
    [write] = plan_orphan(document()).actions
    assert (write.document.deleted, write.replaces) == (True, document())
    assert plan_orphan(write.document) == Plan()


def test_before_the_bus_was_read_nothing_new_is_said_of_what_jobs_hold():
    told = plan_tenant(scene(jobs=(load("a"),)), NOW).status
    unread = scene(status=told, bus=replace(AWAKE, synced=False), jobs=(load("a", Phase.QUEUED, published=False),))
    assert plan_tenant(unread, NOW).status is None
    assert "jobs" not in plan_tenant(replace(unread, status=None), NOW).status
