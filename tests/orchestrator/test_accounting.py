"""A job's records under random schedules of its orchestrator, sandbox and trainers, with kills between any two effects."""

import random
from collections import Counter
from collections.abc import Container

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness import a_manifest, identity
from tests.killing import Killed
from tests.tables import data

from marlaas_api import messages
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import Split, episode_id, train_group
from marlaas_worker.orchestrator import step_records
from marlaas_worker.orchestrator.job_state import JobHistory, JobState
from marlaas_worker.orchestrator.step_records import step_record

GROUP_SIZE = 2
TEAMS = data(__file__, "teams")
"""The agents of jobs; each job has those of one list."""
DECISIONS = messages.GroupDecided | messages.StepClosed
WORLDS = {"one": 120, "two": 60, "several": 42}


class AccountingHarness:
    """A job's records, and an orchestrator, sandbox and trainers that take turns by chance; `deaths` is how likely one is at each effect.

    Each trained policy has a trainer of its own, which may be late. If the job has several agents, an episode calls each that
    its task may call, with the probability `calls`.
    """

    def __init__(self, document: messages.JobDocument, chance: random.Random, deaths: float) -> None:
        self.document, self.chance, self.deaths = document, chance, deaths
        self.faults, self.flats = chance.choice([0, 0.1, 0.4]), chance.choice([0, 0.3, 0.9])
        self.calls = {agent.name: chance.choice([1, 0.7, 0.3, 0]) for agent in document.spec.agents}
        self.names = [agent.name for agent in document.spec.policies]
        self.trained_agents = [agent.name for agent in document.spec.policies if agent.trainable]
        self.rules = document.spec.training
        is_pinned_ahead = self.rules.max_staleness == 0 and len(self.names) > 1
        self.untrained = 0 if is_pinned_ahead else chance.choice([0, 0.5])
        self.records, self.episodes, self.log = [], [], []
        self.policies = {name: messages.PolicyRecord(uid=document.uid, version=0) for name in self.names}
        self.served = dict.fromkeys(self.names, 0)
        self.pins, self.queue = {}, set()
        self.members, self.trained, self.written = Counter(), {name: [] for name in self.names}, []
        self.turns, self.last_turn, self.num_waits = {}, 0, 0
        self.called, self.draws = {}, {}
        self.take_up()

    def take_up(self) -> None:
        history = JobHistory(tuple(self.records), (), tuple(self.log), dict(self.policies))
        self.state, self.mark = JobState(self.document, history), 1
        for episode in self.episodes:
            self.state.add_episode(episode)
        for index in sorted(self.state.groups.in_flight - set(self.state.groups.complete)):
            self.give_out(index)

    def effect(self) -> None:
        if self.chance.random() < self.deaths:
            raise Killed

    def give_out(self, index: int) -> None:
        if self.state.strict:
            for name, version in self.state.assembly.next_versions.items():
                self.pins.setdefault((name, index), version)
        for name, version in self.state.tasks.past.versions.items():
            self.pins.setdefault((name, index), version)
        if not self.members[index]:
            self.queue.add(index)

    def orchestrate(self) -> None:
        state = self.state
        state.policies.update(self.policies)
        self.decide()
        while (draft := state.assembly.recordable(state.committed)) is not None:
            around = step_records.around(state, draft, 0.0, 0.0)
            manifests = {
                name: a_manifest(self.document, part.base_version + 1, agent=name, step=draft.step)
                for name, part in draft.agents.items()
                if part.assigned and name not in around.untrained
            }
            record = step_record(self.document, draft, manifests, around)
            if len(self.records) == record.step:
                self.records.append(record)
            self.effect()
            state.apply(record)
            self.log.append(state.ledger())
            self.effect()
            kept = [at for at, one in enumerate(self.log) if isinstance(one, DECISIONS) and one.step > record.step]
            self.log = self.log[min(kept, default=-1) :]
            self.effect()
            due, self.mark = self.mark, state.turns_from(self.last_turn)
            self.turns = {member: sequence for member, sequence in self.turns.items() if sequence >= due}
            self.effect()
            self.decide()
        if want := state.assembly.want(len(state.groups.in_flight), self.served):
            self.log.append(issued := state.issuing(want, self.last_turn))
            state.apply(issued)
            past = state.tasks.past
            assert self.draws.setdefault(past.step, past.versions) == past.versions, "one draw of past versions a step"
            self.effect()
            for index in issued.indices:
                self.give_out(index)
                self.effect()

    def decide(self) -> None:
        state = self.state
        ready = [(self.sampled_from(group.index), group) for group in state.groups.resolvable(in_order=state.strict)]
        ready = state.assembly.in_order(ready)
        while True:
            state.assembly.oldest = {index: self.oldest(index) for index in state.groups.in_flight}
            if (closed := state.assembly.closing()) is not None:
                self.write(closed)
            if (decided := state.assembly.next_decision(ready)) is not None:
                ready.remove(decided)
                versions, group = decided
                used = messages.UsageAmounts(generated_tokens=1 + group.index, open_tokens=1 + group.index)
                self.write(state.assembly.decision(group, versions, dict.fromkeys(self.names, used)))
            elif closed is None:
                return

    def sampled_from(self, index: int) -> dict[str, int]:
        return {name: self.pins.get((name, index), record.version) for name, record in self.policies.items()}

    def oldest(self, index: int) -> dict[str, int]:
        at, bound = self.state.assembly.next_versions, self.rules.max_staleness
        served = {name: max(version, at[name] - bound) for name, version in self.served.items()}
        return {name: self.pins.get((name, index), version) for name, version in served.items()}

    def write(self, decision: messages.GroupDecided | messages.StepClosed) -> None:
        self.log.append(decision)
        self.written.append(decision)
        self.effect()
        self.state.apply(decision)

    def play(self) -> None:
        for name in self.names:  # a replica loads what is committed, late
            lag = self.chance.choice([0, 0, 0, 1, 2])
            self.served[name] = max(self.served[name], self.policies[name].version - lag)
        if not self.queue:
            return
        index = self.chance.choice(sorted(self.queue))
        group, member = train_group(self.document.ref, index), self.members[index]
        may_speak = self.may_speak(index)
        called = self.draw_called(may_speak)
        for agent in called:
            is_waiting = self.pins.get((agent.pinned_as, index), 0) > self.policies[agent.policy_name].version
            if is_waiting:
                assert not agent.plays_past, "a past version is committed when it is drawn"
                self.num_waits += 1  # a turn waits for the commit of its policy
                return
        self.last_turn += 1
        self.turns[index, member] = self.last_turn
        self.called[index, member] = {agent.name for agent in called if agent.trainable}
        for agent in called:
            self.pins.setdefault((agent.pinned_as, index), self.served[agent.policy_name])
        fault = messages.FaultClass.ENV if self.chance.random() < self.faults else None
        rewards = {
            name: 1.0 if random.Random(f"{index} {number}").random() < self.flats else float(member)
            for number, name in enumerate(may_speak)
        }
        names = identity(self.document) | {"group": group, "split": Split.TRAIN, "index": index, "member": member}
        ended = {} if fault else {"rewards": rewards, "leaves": {agent.name: (0,) for agent in called}}
        ended["may_speak"] = may_speak
        self.episodes.append(messages.Episode(**names, episode=episode_id(group, member, 1), fault=fault, **ended))
        self.members[index] += 1
        if self.members[index] == GROUP_SIZE:
            self.queue.discard(index)
        self.state.add_episode(self.episodes[-1])

    def may_speak(self, index: int) -> tuple[str, ...]:
        """The agents that a task may call, as `agents_of` would say: of every second task of a team a subset, else all."""
        names = [agent.name for agent in self.document.spec.agents]
        if index % 2 or len(names) == 1:
            return tuple(names)
        draw = random.Random(f"{index}")
        return tuple(draw.sample(names, draw.randint(1, len(names))))

    def draw_called(self, may_speak: Container[str]) -> list[AgentSettings]:
        agents = self.document.spec.agents
        if len(agents) == 1:
            return list(agents)
        return [one for one in agents if one.name in may_speak and self.chance.random() < self.calls[one.name]]

    def train(self) -> None:
        """One agent's trainer commits the next step that is closed for it."""
        name = self.chance.choice(self.trained_agents)
        policy, log = (
            self.policies[name],
            [part for one in self.decisions() for part in one.parts if part.agent == name],
        )
        ends = [one for one in log if isinstance(one, messages.AgentClosed)]
        closed = next((one for one in ends if one.num_groups and one.step > policy.step), None)
        if closed is None:
            return
        groups = [one for one in log if isinstance(one, messages.GroupReady) and one.step == closed.step]
        assert [group.position for group in groups] == list(range(closed.num_groups))
        assert 1 <= closed.num_groups <= self.rules.groups_per_step
        assert {one.follows for one in (closed, *groups)} == {policy.step}
        most = policy.version + len(policy.untrained)
        assert all(policy.version <= one.base_version <= most for one in (closed, *groups))
        assert all(0 <= group.staleness <= self.rules.max_staleness for group in groups)
        for group in groups:
            for trajectory in group.trajectories:
                assert (group.index, trajectory.member) in self.turns
                assert (trajectory.agent or name) in self.called[group.index, trajectory.member]
        self.trained[name] += [group.index for group in groups]
        change = {"version": policy.version + 1, "step": closed.step}
        if self.chance.random() < self.untrained:
            untrained = messages.UntrainedStep(step=closed.step, cause="masked")
            change = {"untrained": (*policy.untrained, untrained), "step": closed.step}
        self.policies[name] = policy.model_copy(update=change)

    def decisions(self) -> list[messages.GroupDecided | messages.StepClosed]:
        return [one for one in self.log if isinstance(one, DECISIONS)]

    def live(self) -> None:
        for _ in range(20_000):
            try:
                self.chance.choice([self.orchestrate] * 2 + [self.play] * 4 + [self.train] * len(self.trained_agents))()
                if self.state.training_over:
                    return
                if self.chance.random() < self.deaths / 4:
                    raise Killed
            except Killed:
                self.take_up()
        raise AssertionError("nothing goes on any more")


class RestartingHarness(AccountingHarness):
    """Everything but the orchestrator goes on as it would without restarts, which find no episodes of resolved groups.

    kills: numbers of effects, from 0.
    """

    def __init__(self, document: messages.JobDocument, seed: int, kills: Container[int]) -> None:
        self.kills, self.num_effects = kills, 0
        super().__init__(document, random.Random(seed), 0.0)

    def effect(self) -> None:
        self.num_effects += 1
        if self.num_effects - 1 in self.kills:
            raise Killed

    def take_up(self) -> None:
        decided = {message.index for message in self.written if isinstance(message, messages.GroupDecided)}
        self.episodes = [one for one in self.episodes if one.index not in decided]
        try:
            super().take_up()
        except Killed:
            self.take_up()

    def orchestrate(self) -> None:
        try:
            super().orchestrate()
        except Killed:
            self.take_up()
            self.orchestrate()

    def results(self) -> tuple[object, ...]:
        totals = self.state.fault_totals(), self.state.recorded.usage
        return self.written, self.records, self.state.tasks.walk, self.trained, self.pins, totals


@pytest.mark.parametrize("deaths", [0.0, 0.1])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("team", TEAMS)
def test_steps_are_full_fresh_and_in_order_and_every_group_ends_in_one_record(document, staleness, deaths, team):
    """With several agents: called unevenly, flat for some, trained at their own pace; each step closes once for each policy."""
    for seed in range(WORLDS[team]):
        chance = random.Random(seed)
        rules = {"groupsPerStep": chance.choice([1, 2, 3]), "maxRefill": chance.choice([0, 1, 2])}
        job = document(steps=4, maxStaleness=staleness, agents=TEAMS[team][seed % len(TEAMS[team])], **rules)
        harness = AccountingHarness(job.model_copy(update={"seed": seed}), chance, deaths)
        harness.live()
        assert [record.step for record in harness.records] == [0, 1, 2, 3], seed
        ended = [index for record in harness.records for index in record.indices]
        assert len(ended) == len(set(ended)), seed
        assert not any(record.num_dropped for record in harness.records), seed
        for name, trained in harness.trained.items():
            in_records = sum(record.agents[name].num_groups for record in harness.records)
            assert len(trained) == len(set(trained)) == in_records, seed
            assert staleness or trained == sorted(trained), seed
        ends = [one for one in harness.written if isinstance(one, messages.StepClosed)]
        assert {one.step for one in ends} == {0, 1, 2, 3}, seed
        assert deaths or len(ends) == 4, seed
        assert all([part.agent for part in one.parts] == harness.names for one in ends), seed
        groups = {index for trained in harness.trained.values() for index in trained}
        assert len(groups) == sum(record.num_groups for record in harness.records), seed
        played = {index for index, members in harness.members.items() if members == GROUP_SIZE}
        assert deaths or played <= set(ended), seed
        assert deaths or not harness.decisions(), seed
        if not deaths and not staleness:
            assert {index for index, _ in harness.turns} == set(harness.records[-1].indices), seed


@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("staleness", [0, 1, 2])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), per_step=st.integers(1, 3), refill=st.integers(0, 2), kill=st.integers(0, 200))
def test_killed_anywhere_log_records_and_faults_are_those_without_a_restart(
    document, staleness, team, seed, per_step, refill, kill
):
    rules = {"groupsPerStep": per_step, "maxRefill": refill, "data": {"tasks": 6, "skip": {"passes": 2}}}
    job = document(steps=4, maxStaleness=staleness, agents=TEAMS[team][seed % len(TEAMS[team])], **rules)
    job = job.model_copy(update={"seed": seed})
    whole = RestartingHarness(job, seed, ())
    whole.live()
    for kills in ({kill % whole.num_effects}, range(10_000)):
        harness = RestartingHarness(job, seed, kills)
        harness.live()
        assert harness.results() == whole.results()
