"""Shares of the stream of turns: the sum of what jobs may hold never exceeds it, and every job that fits gets through its steps."""

import random

import pytest
from tests.tables import rows

from marlaas_api.bus import StreamState
from marlaas_worker.orchestrator import stream_space
from marlaas_worker.orchestrator.stream_space import WINDOW_S, EpisodeSize, JobSpace, SpaceNeed, StreamSpace


@pytest.mark.parametrize(("needs", "expected"), rows(__file__, "stream_space"))
def test_bounds(needs, expected):
    assert stream_space.bounds(100, {name: SpaceNeed(*one) for name, one in needs.items()}) == expected


class Job:
    """Gives out groups step by step as its space lets it; of a step's groups some have no signal and are drawn anew."""

    def __init__(self, stream: StreamSpace, name: str, document, chance: random.Random) -> None:
        self.name, self.chance, self.rules = name, chance, document.spec.training
        self.size = EpisodeSize(known=chance.randint(1, 30))
        self.space = JobSpace(stream, name, document.spec, self.size)
        self.group = document.spec.rollout.group_size * self.size.known
        self.evaluation = document.spec.evaluation.tasks * self.size.known
        self.left, self.out, self.resolved, self.signal = self.rules.steps, 0, 0, 0

    @property
    def num_bytes(self) -> int:
        return self.out * self.group

    def turn(self) -> None:
        """Give out what is missing of the step, then resolve it; once the step is full it is on record."""
        most = self.rules.groups_per_step * (1 + self.rules.max_refill)
        missing = min(self.rules.groups_per_step - self.signal, most - self.resolved)
        self.space.update(self.out, evaluating=False, asks=True)
        number = self.space.take(self.out, missing, evaluating=False)
        assert number > 0 or missing == 0 or self.space.why
        self.out, self.resolved = self.out + number, self.resolved + number
        self.signal += sum(self.chance.random() < 0.6 for _ in range(number))

    def record(self) -> None:
        """What is resolved is trained and purged."""
        most = self.rules.groups_per_step * (1 + self.rules.max_refill)
        if self.signal >= self.rules.groups_per_step or self.resolved >= most:
            self.left, self.out, self.resolved, self.signal = self.left - 1, 0, 0, 0
        self.space.update(self.out, evaluating=False, asks=self.left > 0)


def test_many_jobs_on_a_small_stream_never_overfill_it_and_all_get_through(document):
    for seed in range(20):
        chance, stream = random.Random(seed), StreamSpace()
        rules = [{"groupsPerStep": chance.randint(1, 4), "maxRefill": chance.randint(0, 3)} for _ in range(8)]
        jobs = [Job(stream, str(number), document(steps=3, **one), chance) for number, one in enumerate(rules)]
        most = max(one.rules.groups_per_step * (1 + one.rules.max_refill) * one.group + one.evaluation for one in jobs)
        stream.state = StreamState(0, 0, int(chance.uniform(1, 3) * most / stream_space.MAX_HELD) + 1)
        for _ in range(20_000):
            going = [one for one in jobs if one.left]
            if not going:
                break
            chance.choice([Job.turn, Job.record])(chance.choice(going))
            used = sum(one.num_bytes for one in jobs)
            assert used <= stream.capacity, seed
            stream.state = StreamState(0, used, stream.state.max_bytes)
        assert not any(one.left for one in jobs), seed


def test_a_step_that_exceeds_the_stream_is_said_with_its_numbers_and_not_given_out(document):
    stream = StreamSpace()
    stream.state = StreamState(0, 5 << 20, 100 << 20)
    space = JobSpace(stream, "a", document().spec, EpisodeSize(known=20 << 20))
    assert space.take(0, 2, evaluating=False) == 0
    assert "a step may need 200 MiB of turns" in space.why
    assert "5 of 100 MiB in use, of which one job may have 75: lower groupsPerStep" in space.why


def test_a_job_with_as_many_open_groups_as_it_may_have_waits_for_its_trainers_and_for_no_space(document):
    stream = StreamSpace()
    stream.state = StreamState(0, 5 << 20, 100 << 20)
    space = JobSpace(stream, "a", document().spec, EpisodeSize(known=1 << 10))
    num_open = space.take(0, 1000, evaluating=False)
    assert (num_open > 0, space.take(num_open, 2, evaluating=False), space.why) == (True, 0, "")


def test_the_size_of_an_episode_is_the_most_of_the_last_measurements():
    size = EpisodeSize()
    size.see(0.0, 1000.0, 10)
    size.see(WINDOW_S / 2, 9000.0, 20)
    assert size.known == 0, "the window is not over"
    size.see(WINDOW_S, 21_000.0, 30)
    assert size.known == stream_space.MARGIN * 1000
    size.see(2 * WINDOW_S, 31_000.0, 130)
    assert size.known == stream_space.MARGIN * 1000, "100 bytes an episode are less"
    for number in range(3, 7):
        size.see(number * WINDOW_S, 31_000.0 + (number - 2) * 10_000, 130 + (number - 2) * 50)
    assert size.known == stream_space.MARGIN * 200
