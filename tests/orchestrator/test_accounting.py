"""Whatever happens in whatever order, and wherever the orchestrator dies: steps are full, fresh and in order, every group ends in one record,
no turn that is to be trained is purged, and neither the log of assignments nor the turns grow with what is on record."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Container
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlaas_api.messages import (
    Episode,
    FaultClass,
    GroupLogEntry,
    GroupReady,
    IssueLedger,
    JobDocument,
    Manifest,
    PolicyRecord,
    StepClosed,
    UsageAmounts,
)
from marlaas_api.names import Split, episode_id, train_group
from marlaas_worker.orchestrator import reports
from marlaas_worker.orchestrator.job_state import History, JobState

NUM_WORLDS = 150
GROUP_SIZE = 2


class Killed(Exception):
    """The orchestrator died between two effects."""


class AccountingHarness:
    """A job's records, and an orchestrator, sandbox and trainer that take turns by chance; `deaths` is how likely one is at each effect."""

    def __init__(self, document: JobDocument, chance: random.Random, deaths: float) -> None:
        self.document, self.chance, self.deaths = document, chance, deaths
        self.faults, self.flats = chance.choice([0, 0.1, 0.4]), chance.choice([0, 0.3, 0.9])
        self.rules = document.spec.training
        self.log, self.records, self.episodes, self.ledger = [], [], [], None
        self.policy, self.pins, self.queue = PolicyRecord(uid=document.uid, version=0), {}, set()
        self.members, self.trained, self.written = Counter(), [], []
        self.turns, self.last_turn = {}, 0
        self.take_up()

    def take_up(self) -> None:
        history = History(tuple(self.records), (), tuple(self.log), self.ledger, self.policy)
        self.state, self.mark = JobState(self.document, history), 1
        for episode in self.episodes:
            self.state.add_episode(episode)
        for index in sorted(self.state.in_flight - set(self.state.complete)):
            self.give_out(index)

    def effect(self) -> None:
        if self.chance.random() < self.deaths:
            raise Killed

    def give_out(self, index: int) -> None:
        if self.state.strict:
            self.pins.setdefault(index, self.policy.version)
        if not self.members[index]:
            self.queue.add(index)

    def orchestrate(self) -> None:
        state = self.state
        state.policy = self.policy
        self.write(state.assembly.close_if_due())
        ready = [(self.pins.get(group.index, self.policy.version), group) for group in state.resolvable()]
        for version, group in ready if state.strict else sorted(ready, key=lambda pair: pair[0]):
            used = UsageAmounts(generated_tokens=1 + group.index, open_tokens=1 + group.index)
            self.write(state.resolve(group, version, used))
        while (draft := state.assembly.recordable(self.policy.step)) is not None:
            manifest = None if draft.no_op else self.manifest(draft.step, draft.base_version + 1)
            around = reports.Around(0.0, 0.0, state.unrecorded_skips(), state.outcomes(draft.resolved))
            record = reports.step_record(self.document, draft, manifest, around)
            if len(self.records) == record.step:
                self.records.append(record)
            self.effect()
            state.record(record)
            self.ledger = state.ledger()
            self.effect()
            self.log = [one for one in self.log if one.step > record.step] or self.log[-1:]
            self.effect()
            due, self.mark = self.mark, state.turns_from(self.last_turn)
            self.turns = {member: sequence for member, sequence in self.turns.items() if sequence >= due}
            self.effect()
        needed = 0 if state.strict else state.assembly.needed_version(len(state.in_flight))
        if state.assembly.want(len(state.in_flight)) and needed <= self.policy.version:
            indices = state.take_indices(state.assembly.want(len(state.in_flight)), self.last_turn)
            self.ledger = state.ledger()
            self.effect()
            for index in indices:
                self.give_out(index)
                self.effect()

    def write(self, messages: list[GroupLogEntry]) -> None:
        for message in messages:
            self.log.append(message)
            self.written.append(message)
            self.effect()

    def play(self) -> None:
        if not self.queue:
            return
        index = self.chance.choice(sorted(self.queue))
        group, member = train_group(self.document.ref, index), self.members[index]
        self.last_turn += 1
        self.turns[index, member] = self.last_turn
        self.pins.setdefault(index, max(0, self.policy.version - self.chance.choice([0, 0, 0, 1, 2])))
        fault = FaultClass.ENV if self.chance.random() < self.faults else None
        reward = 1.0 if random.Random(index).random() < self.flats else float(member)
        names = {"namespace": self.document.namespace, "job": self.document.job, "uid": self.document.uid}
        names |= {"group": group, "split": Split.TRAIN, "index": index, "member": member}
        rewards = {} if fault else {"policy": reward}
        self.episodes.append(Episode(**names, episode=episode_id(group, member, 1), fault=fault, rewards=rewards))
        self.members[index] += 1
        if self.members[index] == GROUP_SIZE:
            self.queue.discard(index)
        self.state.add_episode(self.episodes[-1])

    def train(self) -> None:
        closed = min(
            (one for one in self.log if isinstance(one, StepClosed) and one.num_groups and one.step > self.policy.step),
            key=lambda one: one.step,
            default=None,
        )
        if closed is None:
            return
        groups = [one for one in self.log if isinstance(one, GroupReady) and one.step == closed.step]
        assert [group.position for group in groups] == list(range(closed.num_groups))
        assert 1 <= closed.num_groups <= self.rules.groups_per_step
        assert {closed.base_version, *(group.base_version for group in groups)} == {self.policy.version}
        assert all(0 <= group.staleness <= self.rules.max_staleness for group in groups)
        assert all((group.index, member) in self.turns for group in groups for member in range(GROUP_SIZE))
        self.trained += [group.index for group in groups]
        self.policy = self.policy.model_copy(update={"version": self.policy.version + 1, "step": closed.step})

    def live(self) -> None:
        for _ in range(20_000):
            try:
                self.chance.choice([self.orchestrate] * 2 + [self.play] * 4 + [self.train])()
                if self.state.training_over:
                    return
                if self.chance.random() < self.deaths / 4:
                    raise Killed
            except Killed:
                self.take_up()
        raise AssertionError("nothing goes on any more")

    def manifest(self, step: int, version: int) -> Manifest:
        names = {"namespace": self.document.namespace, "job": self.document.job, "uid": self.document.uid}
        blobs = {"parent": None, "files": {}, "state": None, "tensor_digests": {}, "probes": ()}
        return Manifest(**names, **blobs, agent="policy", version=version, step=step, rank=8)


@pytest.mark.parametrize("deaths", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_steps_are_full_fresh_and_in_order_and_every_group_ends_in_one_record(document, staleness, deaths):
    for seed in range(NUM_WORLDS):
        chance = random.Random(seed)
        rules = {"groupsPerStep": chance.choice([1, 2, 3]), "maxRefill": chance.choice([0, 1, 2])}
        harness = AccountingHarness(document(steps=4, maxStaleness=staleness, **rules), chance, deaths)
        harness.live()
        assert [record.step for record in harness.records] == [0, 1, 2, 3], seed
        ended = [index for record in harness.records for index in record.indices]
        assert len(ended) == len(set(ended)), seed
        assert (
            len(harness.trained) == len(set(harness.trained)) == sum(record.num_groups for record in harness.records)
        ), seed
        played = {index for index, members in harness.members.items() if members == GROUP_SIZE}
        assert deaths or played <= set(ended), seed
        assert deaths or len(harness.log) <= 1, seed
        if not deaths and not staleness:
            assert {index for index, _ in harness.turns} == set(harness.records[-1].indices), seed


class RestartingHarness(AccountingHarness):
    """Everything but the orchestrator goes on as it would without restarts, which find no episodes of resolved groups.

    kills: numbers of effects, from 0.
    """

    def __init__(self, document: JobDocument, seed: int, kills: Container[int]) -> None:
        self.kills, self.num_effects = kills, 0
        super().__init__(document, random.Random(seed), 0.0)

    def effect(self) -> None:
        self.num_effects += 1
        if self.num_effects - 1 in self.kills:
            raise Killed

    def take_up(self) -> None:
        resolved = {message.index for message in self.written if not isinstance(message, StepClosed)}
        self.episodes = [episode for episode in self.episodes if episode.index not in resolved]
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
        return (
            self.written,
            self.records,
            self.state.walk,
            self.trained,
            self.state.fault_totals(),
            self.state.recorded.usage,
        )


@pytest.mark.parametrize("staleness", [0, 1, 2])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), per_step=st.integers(1, 3), refill=st.integers(0, 2), kill=st.integers(0, 200))
def test_wherever_the_orchestrator_is_killed_log_records_and_faults_are_those_without_a_restart(
    document, staleness, seed, per_step, refill, kill
):
    rules = {"groupsPerStep": per_step, "maxRefill": refill, "data": {"tasks": 6, "skip": {"passes": 2}}}
    job = document(steps=4, maxStaleness=staleness, **rules)
    whole = RestartingHarness(job, seed, ())
    whole.live()
    for kills in ({kill % whole.num_effects}, range(10_000)):
        harness = RestartingHarness(job, seed, kills)
        harness.live()
        assert harness.results() == whole.results()


def executed(work: Callable[[], object]) -> int:
    """The number of bytecode instructions that a call executes."""
    number = 0

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return number


def test_taking_up_and_recording_a_step_is_linear_in_its_groups(document, play):
    def instructions(num: int) -> int:
        job = document(groupsPerStep=num, maxStaleness=1, maxRefill=3)
        log, episodes = [], []
        ledger = IssueLedger(
            namespace="team-a", job="sums", uid=job.uid, next_index=2 * num, open=tuple(range(2 * num))
        )
        first = JobState(job, History(ledger=ledger, policy=PolicyRecord(uid=job.uid, version=0)))
        for index in range(2 * num):
            episodes += play(job, index, (1.0, float(index % 2)))
            first.add_episode(episodes[-2])
            first.add_episode(episodes[-1])
            log += first.resolve(first.complete[index], 0)
        assert [message.num_groups for message in log if isinstance(message, StepClosed)] == [num]

        def take_up() -> None:
            state = JobState(job, History(groups=tuple(log), ledger=ledger, policy=first.policy))
            for episode in episodes:
                state.add_episode(episode)
            assert state.resolvable() == []
            (draft, _) = state.assembly.drafts
            manifest = Manifest(
                **{"namespace": "team-a", "job": "sums", "uid": job.uid, "agent": "policy", "version": 1, "step": 0},
                **{"parent": None, "rank": 8, "files": {}, "state": None, "tensor_digests": {}, "probes": ()},
            )
            state.record(reports.step_record(job, draft, manifest, reports.Around(0.0, 0.0)))
            assert len(state.unrecorded) == 1

        return executed(take_up)

    small, large = instructions(100), instructions(400)
    assert large < 4.2 * small
