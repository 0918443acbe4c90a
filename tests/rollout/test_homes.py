"""Which replicas serve which agent: the fewest that carry its load, the same for everybody, and moved rarely."""

from collections import Counter

import pytest
from tests.harness import job_document

from marlaas_api.messages import JobAgent, ReplicaReport
from marlaas_worker.rollout.homes import homes

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


def test_groups_go_to_an_agents_replicas_in_turn_and_members_to_one():
    large = agent("large", groups=8, size=8)
    placed = homes([large], REPLICAS[:2], 32, ())
    owners = [placed.owner(large.policy_key, f"{large.document.uid}-t{number}") for number in range(8)]
    assert Counter(owners) == {"rollout-0": 4, "rollout-1": 4}
    assert placed.owner(large.policy_key, f"{large.document.uid}-e3v5") == owners[3]


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
