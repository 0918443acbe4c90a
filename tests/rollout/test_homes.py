"""Which replicas serve which agent: the fewest that carry its load, the same for everybody, and moved rarely."""

from collections import Counter
from itertools import permutations

import pytest
from tests.harness import job_document

from marlaas_api.messages import JobAgent, ReplicaReport
from marlaas_worker.rollout.homes import MIN_PART, _costs, homes

NUM_SEQS = 64
REPLICAS = ["rollout-0", "rollout-1", "rollout-2"]


def agent(name: str, groups: int = 2, size: int = 4, **training: int) -> JobAgent:
    spec = {
        "rollout": {"groupSize": size},
        "training": {"steps": 1, "groupsPerStep": groups, "maxStaleness": 0} | training,
    }
    document = job_document(name, spec=spec)
    return JobAgent(document, document.spec.agents[0])


def report(replica: str, *agents: JobAgent) -> ReplicaReport:
    names = tuple(one.adapter(3).engine_name for one in agents)
    return ReplicaReport(role="rollout", pool="tiny", replica=replica, verified=names)


def of_all(placed, agents):
    return {one.document.job: placed.of(one.policy_key) for one in agents}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 8), ({"maxStaleness": 1}, 16), ({"groups": 64, "size": 64}, 64), ({"groups": 1, "size": 2}, 2)],
)
def test_open_episodes_are_those_of_the_steps_in_flight_and_at_most_the_sandboxes(settings, expected):
    one = agent("a", **settings)
    assert one.document.spec.environment.concurrency == 64
    assert one.document.spec.open_episodes == expected


def test_small_agents_live_on_one_replica_each_and_share_the_replicas():
    agents = [agent(f"j{number}") for number in range(30)]
    placed = homes(agents, REPLICAS, NUM_SEQS, ())
    assert all(len(placed.of(one.policy_key)) == 1 for one in agents)
    assert sorted(Counter(placed.of(one.policy_key)[0] for one in agents).values()) == [10, 10, 10]
    assert of_all(homes(agents[::-1], REPLICAS[::-1], NUM_SEQS, ()), agents) == of_all(placed, agents)


def test_an_agent_whose_episodes_do_not_fit_one_batch_lives_on_as_many_as_it_needs():
    large = agent("large", groups=8, size=8)
    assert [len(homes([large], REPLICAS, num_seqs, ()).of(large.policy_key)) for num_seqs in (64, 32, 10)] == [1, 2, 3]


def test_an_agent_that_needs_several_replicas_stays_where_it_is_and_its_load_counts_for_the_others():
    """Its two parts of 32 keep 16 small agents of 4 from its replicas, but for those that the mean leaves room for."""
    large, small = agent("large", groups=8, size=8), [agent(f"j{number}", groups=1) for number in range(16)]
    for pair in (["rollout-0", "rollout-1"], ["rollout-1", "rollout-2"], ["rollout-2", "rollout-0"]):
        placed = homes([large, *small], REPLICAS, 32, [report(name, large) for name in pair])
        assert set(placed.of(large.policy_key)) == set(pair)
        counts = Counter(replica for one in small for replica in placed.of(one.policy_key))
        (free,) = set(REPLICAS) - set(pair)
        assert counts[free] >= 10


def test_an_agent_is_where_its_newest_version_is():
    """A replica that it has left keeps older versions until their slots are needed."""
    one = agent("a")
    for now, before in (("rollout-0", "rollout-1"), ("rollout-1", "rollout-0")):
        left = report(before).model_copy(update={"verified": (one.adapter(2).engine_name, one.adapter(9).engine_name)})
        here = report(now).model_copy(update={"verified": (one.adapter(10).engine_name,)})
        assert homes([one], REPLICAS, NUM_SEQS, [left, here]).of(one.policy_key) == (now,)


def test_groups_go_to_an_agents_replicas_in_turn_and_members_to_one():
    large = agent("large", groups=8, size=8)
    placed = homes([large], REPLICAS[:2], 32, ())
    owners = [placed.owner(large.policy_key, f"{large.document.uid}-t{number}") for number in range(8)]
    assert Counter(owners) == {"rollout-0": 4, "rollout-1": 4}
    assert placed.owner(large.policy_key, f"{large.document.uid}-e3v5") == owners[3]


def team(**agent_tokens: float) -> tuple[list[JobAgent], list[ReplicaReport]]:
    """The agents of one job, and reports whose sums are these tokens."""
    document = job_document("team", spec={"agents": [{"name": name} for name in agent_tokens]})
    agents = [JobAgent(document, one) for one in document.spec.agents]
    tokens = {one.policy_key: agent_tokens[one.agent.name] / 2 for one in agents}
    return agents, [report(name).model_copy(update={"agent_tokens": tokens}) for name in REPLICAS[:2]]


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_agents_of_a_job_are_placed_by_their_recent_tokens(order):
    tokens = dict(zip(order, (8000.0, 4000.0, 2000.0, 1000.0), strict=True))
    agents, reports = team(**tokens)
    placed = homes(agents, REPLICAS[:2], NUM_SEQS, reports)
    loads = Counter[str]()
    for one in agents:
        (replica,) = placed.of(one.policy_key)
        loads[replica] += int(tokens[one.agent.name])
    assert sorted(loads.values()) == [7000, 8000]


def test_an_agent_without_tokens_counts_a_little_and_without_any_tokens_all_count_the_same():
    agents, reports = team(a=9000.0, b=0.0, c=0.0)
    loads = {one.policy_key: one.document.spec.open_episodes for one in agents}
    assert _costs(agents, loads, reports) == {
        one.policy_key: pytest.approx(loads[one.policy_key] * (3.0 if one.agent.name == "a" else MIN_PART))
        for one in agents
    }
    assert _costs(agents, loads, ()) == loads


def test_an_agent_stays_where_its_adapter_is():
    agents = [agent(f"j{number}") for number in range(12)]
    before = homes(agents, REPLICAS, NUM_SEQS, ())
    reports = [report(name, *(one for one in agents if name in before.of(one.policy_key))) for name in REPLICAS]
    newcomer = agent("newcomer")
    after = homes([*agents, newcomer], REPLICAS, NUM_SEQS, reports)
    assert of_all(after, agents) == of_all(before, agents)


def test_a_dying_replica_moves_only_its_own_agents():
    agents = [agent(f"j{number}") for number in range(12)]
    before = homes(agents, REPLICAS, NUM_SEQS, ())
    reports = [report(name, *(one for one in agents if name in before.of(one.policy_key))) for name in REPLICAS]
    after = homes(agents, REPLICAS[:2], NUM_SEQS, reports[:2])
    for one in agents:
        assert before.of(one.policy_key) == after.of(one.policy_key) or before.of(one.policy_key) == ("rollout-2",)


@pytest.mark.parametrize("group", ["", "t1", "uid-sums-x", "uid-sums-t" + "9" * 5000])
def test_requests_of_unknown_agents_and_with_invalid_names_have_an_owner(group):
    assert homes([], REPLICAS, NUM_SEQS, ()).owner("team-a.gone.policy", group) in REPLICAS
