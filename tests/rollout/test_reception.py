"""Which replicas serve which agent, and which of them generates a group's turns: by load, the same for everybody, and moved rarely."""

from collections import Counter
from itertools import permutations

import pytest
from tests.harness import job_document
from tests.tables import rows

from marlaas_api.messages import JobAgent, ReplicaReport
from marlaas_worker.rollout.reception import EVEN, MIN_EXCESS, MIN_PART, AgentPlacement, _costs, place_agents

NUM_SEQS, KEY = 64, "team-a.sums.policy"
REPLICAS = ["rollout-0", "rollout-1", "rollout-2"]


def agent(name, groups=2, size=4, **training):
    training = {"steps": 1, "groupsPerStep": groups, "maxStaleness": 0} | training
    document = job_document(name, spec={"rollout": {"groupSize": size}, "training": training})
    return JobAgent(document, document.spec.agents[0])


def report(replica, *agents):
    names = tuple(one.adapter(3).engine_name for one in agents)
    return ReplicaReport(role="rollout", pool="tiny", replica=replica, verified=names)


def of_all(placed, agents):
    return {one.document.job: placed.of(one.policy_key) for one in agents}


@pytest.mark.parametrize(("settings", "expected"), rows(__file__, "open_episodes"))
def test_open_episodes_are_those_of_the_steps_in_flight_and_at_most_the_sandboxes(settings, expected):
    spec = agent("a", **settings).document.spec
    assert (spec.environment.concurrency, spec.open_episodes) == (64, expected)


def test_small_agents_share_the_replicas_stay_where_they_are_and_only_those_of_a_dying_replica_move():
    agents = [agent(f"j{number}") for number in range(30)]
    placed = place_agents(agents, REPLICAS, NUM_SEQS, ())
    assert all(len(placed.of(one.policy_key)) == 1 for one in agents)
    assert sorted(Counter(placed.of(one.policy_key)[0] for one in agents).values()) == [10, 10, 10]
    assert of_all(place_agents(agents[::-1], REPLICAS[::-1], NUM_SEQS, ()), agents) == of_all(placed, agents)
    reports = [report(name, *(one for one in agents if name in placed.of(one.policy_key))) for name in REPLICAS]
    after = place_agents([*agents, agent("newcomer")], REPLICAS, NUM_SEQS, reports)
    assert of_all(after, agents) == of_all(placed, agents)
    after = place_agents(agents, REPLICAS[:2], NUM_SEQS, reports[:2])
    stay = [one for one in agents if placed.of(one.policy_key) != ("rollout-2",)]
    assert of_all(after, stay) == of_all(placed, stay)


def test_an_agent_whose_episodes_do_not_fit_one_batch_lives_on_as_many_as_it_needs_and_stays_there():
    """Its two parts of 32 keep 16 small agents of 4 from its replicas, but for those that the mean leaves room for."""
    large, small = agent("large", groups=8, size=8), [agent(f"j{number}", groups=1) for number in range(16)]
    assert [len(place_agents([large], REPLICAS, num_seqs, ()).of(large.policy_key)) for num_seqs in (64, 32, 10)] == [
        1,
        2,
        3,
    ]
    for pair in (["rollout-0", "rollout-1"], ["rollout-1", "rollout-2"], ["rollout-2", "rollout-0"]):
        placed = place_agents([large, *small], REPLICAS, 32, [report(name, large) for name in pair])
        assert set(placed.of(large.policy_key)) == set(pair)
        counts = Counter(replica for one in small for replica in placed.of(one.policy_key))
        (free,) = set(REPLICAS) - set(pair)
        assert counts[free] >= 10
    placed = place_agents([large], REPLICAS[:2], 32, ())
    owners = [placed.owner(large.policy_key, f"{large.document.uid}-t{number}") for number in range(8)]
    assert Counter(owners) == {"rollout-0": 4, "rollout-1": 4}, "its groups in turn, and members to one"
    assert placed.owner(large.policy_key, f"{large.document.uid}-e3v5") == owners[3]


def test_an_agent_is_where_its_newest_version_is():
    """A replica that it has left keeps older versions until their slots are needed."""
    one = agent("a")
    for now, before in (("rollout-0", "rollout-1"), ("rollout-1", "rollout-0")):
        left = report(before).model_copy(update={"verified": (one.adapter(2).engine_name, one.adapter(9).engine_name)})
        here = report(now).model_copy(update={"verified": (one.adapter(10).engine_name,)})
        assert place_agents([one], REPLICAS, NUM_SEQS, [left, here]).of(one.policy_key) == (now,)


def team(**agent_tokens):
    """The agents of one job, and reports whose sums are these tokens."""
    document = job_document("team", spec={"agents": [{"name": name} for name in agent_tokens]})
    agents = [JobAgent(document, one) for one in document.spec.agents]
    tokens = {one.policy_key: agent_tokens[one.agent.name] / 2 for one in agents}
    return agents, [report(name).model_copy(update={"agent_tokens": tokens}) for name in REPLICAS[:2]]


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_agents_of_a_job_are_placed_by_their_recent_tokens(order):
    tokens = dict(zip(order, (8000, 4000, 2000, 1000), strict=True))
    agents, reports = team(**tokens)
    placed, loads = place_agents(agents, REPLICAS[:2], NUM_SEQS, reports), Counter()
    for one in agents:
        (replica,) = placed.of(one.policy_key)
        loads[replica] += tokens[one.agent.name]
    assert sorted(loads.values()) == [7000, 8000]


def test_an_agent_without_tokens_counts_a_little_and_without_any_tokens_all_count_the_same():
    agents, reports = team(a=9000.0, b=0.0, c=0.0)
    loads = {one.policy_key: one.document.spec.open_episodes for one in agents}
    parts = {one.policy_key: 3.0 if one.agent.name == "a" else MIN_PART for one in agents}
    assert _costs(agents, loads, reports) == pytest.approx({key: loads[key] * part for key, part in parts.items()})
    assert _costs(agents, loads, ()) == loads


@pytest.mark.parametrize("group", ["", "t1", "uid-sums-x", "uid-sums-t" + "9" * 5000])
def test_requests_of_unknown_agents_and_with_invalid_names_have_an_owner(group):
    assert place_agents([], REPLICAS, NUM_SEQS, ()).owner("team-a.gone.policy", group) in REPLICAS


def homes_of(*loads):
    names = "abcd"[: len(loads)]
    return AgentPlacement({KEY: tuple(names)}, tuple(names), dict(zip(names, loads, strict=True)))


def owners(placed, numbers, last=""):
    return [placed.owner(KEY, f"uid-t{number}", last) for number in numbers]


@pytest.mark.parametrize("first", [0, 5, 1000])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_groups_of_a_step_are_divided_evenly_while_the_loads_are_equal(num, first):
    found = Counter(owners(homes_of(*[7] * num), range(first, first + 4 * num)))
    assert max(found.values()) - min(found[name] for name in "abcd"[:num]) <= 2


@pytest.mark.parametrize(("loads", "parts"), rows(__file__, "divisions"))
def test_new_groups_are_divided_by_the_inverse_square_of_the_loads(loads, parts):
    """Of the loads plus eight: (16, 16); (8, 16); (48, 24); (16, 16, 32)."""
    assert EVEN == 8
    found = Counter(owners(homes_of(*loads), range(1024)))
    shares = [found[name] / 1024 for name in "abc"[: len(loads)]]
    assert shares == pytest.approx([part / sum(parts) for part in parts], abs=0.01)


@pytest.mark.parametrize(("loads", "is_overloaded"), rows(__file__, "overloads"))
def test_a_replica_is_overloaded_with_twice_the_load_of_another_and_eight_requests_more(loads, is_overloaded):
    assert MIN_EXCESS == 8
    assert ("b" in owners(homes_of(*loads), range(256), last="a")) is is_overloaded


def test_the_part_of_an_overloaded_replicas_groups_moves_that_exceeds_the_mean_and_no_other_one():
    """30 and 10: a third of the 30 is above the mean of 20."""
    found = owners(homes_of(30, 10), range(2000), last="a")
    assert found.count("b") / 2000 == pytest.approx(1 / 3, abs=0.03)
    assert set(owners(homes_of(30, 10), range(2000), last="b")) == {"b"}
    assert owners(homes_of(60, 20), range(2000), last="a") == found
    for last in ("gone", "c", "\0"):
        assert owners(homes_of(0, 0), [0], last) == owners(homes_of(0, 0), [0]), "names of others mean nothing"
