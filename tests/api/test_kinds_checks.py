"""Whether a job fits its pool, and whether this version can run it; objects as they were stored once must be read for ever: add to `fixtures/v1alpha1` only."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator import objects
from tests.tables import rows

from marlaas_api.kinds import KINDS, ModelPool, RLJob, Tenant, checks
from marlaas_api.kinds.fields import nearest
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.numeric import quantity

CASES = yaml.safe_load(Path(__file__).with_name("checks.yaml").read_text())
STORED = sorted((Path(__file__).parent / "fixtures/v1alpha1").glob("*.yaml"))
BY_NAME = {kind.__name__: kind for kind in KINDS}


def _job(**spec: Any) -> RLJob:
    plain = {"environment": {"name": "reverse"}, "training": {"steps": 3}}
    return RLJob.model_validate(objects.job("team-a", "sums", "tiny", **(plain | spec)))


def _pool(**spec: Any) -> ModelPool:
    return ModelPool.model_validate(objects.pool("tiny", **spec))


def _agent(**adapter: Any) -> list[dict[str, Any]]:
    return [{"name": "policy", "adapter": adapter}]


def _told(problems: Iterable[object]) -> list[str]:
    return [str(problem) for problem in problems]


SHORT = ModelPool.model_validate(objects.pool("short", rollout={"maxModelLen": 256}))
CHECKS = {
    "misfits": checks.check_fit,
    "unsupported": lambda job, pool: checks.check_supported(job),
    "local": lambda job, pool: [*checks.check_local(job), *checks.check_local_pool(pool)],
    "remarks": lambda job, pool: checks.remarks(job, [pool, SHORT]),
}
"""Specs that no pool can run, fields that this version does not implement, fields for clusters only, and probable mistakes."""


@pytest.mark.parametrize(
    ("check", "case"), [pytest.param(kind, case, id=name) for kind in CHECKS for name, case in CASES[kind].items()]
)
def test_what_a_check_finds_is_told_in_one_sentence_with_the_numbers_of_both_sides(check, case):
    assert _told(CHECKS[check](_job(**case.get("job", {})), _pool(**case.get("pool", {})))) == [case["says"]]


def test_what_fits_exactly_is_taken():
    rollout = {"maxTokens": 511, "maxTurns": 1}
    job = _job(agents=_agent(rank=16), training={"steps": 3, "maxStaleness": 1}, rollout=rollout)
    pool = _pool(adapterSlots=3, maxRank=16, namespaces=["team-a"], rollout={"maxModelLen": 512})
    assert list(checks.check_fit(job, pool)) == []
    assert list(checks.remarks(job, [pool])) == []
    other_layers = _job(agents=_agent(targets=["qkv"]))
    assert list(checks.check_fit(other_layers, _pool(model={"path": "/models/x"}))) == [], "a model that is not builtin"


def test_a_jobs_pools_are_its_own_and_those_of_its_agents():
    agents = [{"name": "a", "poolRef": {"name": "big"}}, {"name": "b"}, {"name": "c", "poolRef": {"name": "tiny"}}]
    job = _job(agents=agents)
    assert list(checks.check_supported(job)) == []
    assert job.spec.pools == ("tiny", "big")
    assert [at for at, _ in job.spec.agents_on("tiny")] == [1, 2]
    assert _job(agents=agents[:1]).spec.pools == ("tiny", "big"), "the job's pool bounds its sandboxes"


@pytest.mark.parametrize("case", CASES["pools"].values(), ids=CASES["pools"])
def test_each_agent_has_to_fit_its_own_pool(case):
    agents = [{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}]
    job = _job(agents=[agent | case.get("agent", {}) for agent in agents], **case.get("job", {}))
    pool = ModelPool.model_validate(objects.pool("big", **case["pool"]))
    assert _told(checks.check_fit(job, pool)) == case["says"]
    assert list(checks.check_fit(job, _pool(maxRank=32))) == [], "the other pool allows it"


def test_what_a_cluster_follows_and_this_machine_does_without_is_told():
    case = CASES["cluster"]
    told = [*checks.cluster_remarks(_job(**case["job"])), *checks.pool_remarks(_pool(**case["pool"]))]
    assert {problem.text for problem in told} == {"used only in a cluster; `marlaas run` ignores it"}
    assert [problem.path for problem in told] == case["paths"]
    assert [*checks.cluster_remarks(_job()), *checks.pool_remarks(_pool())] == []


@pytest.mark.parametrize("training", CASES["plain"], ids=str)
def test_defaults_and_a_clip_or_no_correction_where_it_means_something_need_no_remark(training):
    assert list(checks.remarks(_job(training={"steps": 3, **training}), [_pool()])) == []


@pytest.mark.parametrize(("text", "value"), rows(__file__, "quantities"))
def test_a_quantity_has_the_value_that_kubernetes_gives_it(text, value):
    assert quantity(text) == pytest.approx(value)


def test_an_invalid_object_says_everything_at_once():
    with pytest.raises(InvalidObject) as caught:
        parse(Tenant, objects.tenant("sums", weight=0, wieght=1))
    entries, weight, unknown = str(caught.value).splitlines()
    assert entries == "spec.namespaces: must have at least 1 entry, found 0"
    assert (weight, unknown) == (
        "spec.weight: must be more than 0, found 0",
        "spec.wieght: unknown field; did you mean 'weight'?",
    )


@pytest.mark.parametrize(("name", "right"), rows(__file__, "nearest"))
def test_the_nearest_name_is_the_one_that_was_probably_meant(name, right):
    assert nearest(name, ["maxTokens", "maxTurns", "groupSize"]) == right


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that an object says something of; free-form arguments as one."""
    if isinstance(value, dict) and value and not path.endswith((".args", ".affinity")):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}[{at}]")
    else:
        yield path, value


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_was_stored_once_is_read_with_every_field(path):
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    read = parse(BY_NAME[body["kind"]], body).model_dump(mode="json", by_alias=True)
    again = dict(_leaves(read))
    for field, value in _leaves(body):
        assert again[field] == (str(value) if field.endswith(".cpu") else value), field


def test_there_is_a_smallest_and_a_full_object_of_each_kind():
    wanted = {f"{name.lower()}-{size}" for name in BY_NAME for size in ("minimal", "full")}
    assert wanted <= {path.stem for path in STORED}
