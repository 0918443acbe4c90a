"""The log of groups as steps, rows and micro-batches: each group once and in order, every segment in its own context."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import rows

from marlaas_api.messages import AgentClosed, GroupReady, TrajectoryRef
from marlaas_worker.trainer.batching import Row, Segment, chain, collate, pack, pack_prefix_tree
from marlaas_worker.trainer.intake import LogInvalid, StepInbox

lengths = st.lists(st.integers(2, 40), max_size=30)
alike = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=10)


def segment(ids, advantage=1.0):
    generated = np.arange(len(ids)) % 3 == 1
    behaviour = np.where(generated, -0.5 * np.arange(len(ids)) - 0.5, 0).astype(np.float32)
    return Segment(np.array(ids, np.int32), generated, behaviour, 0, advantage)


def row(length):
    return chain(segment(list(range(1, length + 1))))


def context(planted, place):
    ids: list[int] = []
    while place >= 0:
        ids.insert(0, int(planted.ids[place]))
        place = int(planted.parents[place])
    return ids


def seen(batch):
    """For each token of each row, the indices of the tokens to which it attends."""
    enters, leaves = batch.trees.enters, batch.trees.leaves
    sees = (enters[:, None, :] <= enters[:, :, None]) & (enters[:, :, None] < leaves[:, None, :])
    return [[np.flatnonzero(places).tolist() for places in row] for row in sees]


def ancestors(parents, place):
    return [*ancestors(parents, parents[place]), place] if place >= 0 else []


@given(ids=alike, pairs_per_token=st.sampled_from([0, 10, 1000]), budget=st.integers(12, 60))
def test_however_beginnings_are_shared_each_token_is_predicted_once_from_its_past(ids, pairs_per_token, budget):
    segments = [
        replace(segment(values, float(number)), trajectory=number // 2, trajectory_tokens=50 + number // 2)
        for number, values in enumerate(ids)
    ]
    expected, found = [], []
    for part in segments:
        for place in np.flatnonzero(part.generated).tolist():
            past = part.ids[:place].tolist()
            whole = part.advantage, part.trajectory, part.num_trajectory_tokens
            expected.append((past, int(part.ids[place]), float(part.behaviour[place]), *whole))
    rows = pack_prefix_tree(segments, pairs_per_token, budget)
    for planted in rows:
        tokens = planted.before, planted.targets, planted.behaviour, planted.advantages
        values = zip(*tokens, planted.trajectories, planted.lengths, strict=True)
        found += [(context(planted, int(b)), int(t), float(p), float(a), int(i), int(n)) for b, t, p, a, i, n in values]
        assert len(planted) <= budget
        assert (planted.parents < np.arange(len(planted))).all()
        assert planted.depths.tolist() == [len(context(planted, place)) - 1 for place in range(len(planted))]
    if (batch := collate(rows)).trees is not None:
        for planted, attended in zip(rows, seen(batch), strict=True):
            alone = [[place] for place in range(len(planted), len(attended))]
            assert attended == [ancestors(planted.parents, place) for place in range(len(planted))] + alone
    assert sorted(found) == sorted(expected)
    assert sum(planted.num_segment_tokens for planted in rows) == sum(map(len, ids))


def test_a_shared_prompt_is_one_run_of_tokens_unless_attention_would_cost_more():
    prompt = list(range(10, 30))
    rows = pack_prefix_tree([segment([*prompt, 1, 2]), segment([*prompt, 1, 3, 4]), segment([*prompt, 5])], 1000, 1000)
    assert [planted.ids.tolist() for planted in rows] == [[*prompt, 5, 1, 2, 3, 4]]
    assert rows[0].parents.tolist() == [*range(-1, 19), 19, 19, 21, 21, 23]
    short, long = list(range(10)), list(range(100, 400))
    group = [segment([*short, 500 + number, *long]) for number in range(4)]
    assert len(pack_prefix_tree(group, 384, 1 << 20)) == 4
    assert len(pack_prefix_tree(group, 1 << 20, 1 << 20)) == 1
    assert len(pack_prefix_tree([segment([1, 2, 3]), segment([4, 2, 3])], 1 << 20, 1 << 20)) == 2, "strangers"


@given(lengths=lengths, cuts=st.lists(st.integers(0, 30), max_size=6), budget=st.integers(16, 200))
def test_microbatches_do_not_depend_on_how_rows_arrive(lengths, cuts, budget):
    rows = [row(length) for length in lengths]
    whole, rest = pack([], rows, budget)
    batches: list[list[Row]] = []
    pending: list[Row] = []
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for begin, end in itertools.pairwise(bounds):
        full, pending = pack(pending, rows[begin:end], budget)
        batches += full
    assert [[id(part) for part in batch] for batch in [*batches, pending]] == [
        [id(part) for part in batch] for batch in [*whole, rest]
    ]


@given(lengths=lengths, budget=st.integers(16, 200))
def test_every_row_is_in_one_microbatch_in_order_and_only_a_lone_one_exceeds_the_budget(lengths, budget):
    full, rest = pack([], [row(length) for length in lengths], budget)
    batches = [batch for batch in [*full, rest] if batch]
    assert [len(part) for batch in batches for part in batch] == lengths
    for batch in batches:
        assert len(batch) == 1 or max(map(len, batch)) * len(batch) <= budget


def test_a_microbatch_says_where_its_tokens_are_predicted_and_what_each_token_sees():
    batch = collate([chain(segment([1, 2, 3], 1.5)), chain(segment([1, 2, 3, 4, 5, 6], -2.0))])
    assert batch.ids.tolist() == [[1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.before.tolist() == [0, 6, 9]
    assert batch.targets.tolist() == [2, 2, 5]
    assert batch.advantages.tolist() == [1.5, -2.0, -2.0]
    assert batch.behaviour.tolist() == [-1.0, -1.0, -2.5]
    assert batch.sequences.tolist() == [0, 1, 1]
    assert batch.lengths.tolist() == [1, 2, 2], "a segment that says nothing else is its whole trajectory"
    assert (batch.num_padded_tokens, batch.trees) == (12, None)
    (shared,) = pack_prefix_tree([segment([7, 8, 1]), segment([7, 8, 2, 3])], 1000, 1000)
    batch = collate([shared, row(6)])
    assert batch.ids[0].tolist() == [7, 8, 1, 2, 3, 0]
    assert batch.trees.depths.tolist() == [[0, 1, 2, 2, 3, 0], [0, 1, 2, 3, 4, 5]]
    assert seen(batch)[0] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [5]]
    assert seen(batch)[1] == [list(range(place + 1)) for place in range(6)]
    assert batch.sequences.tolist() == [0, 1, 2, 2], "the generated tokens of a segment are one sequence"


Log = list[GroupReady | AgentClosed]
IDS = {"namespace": "team-a", "job": "sums", "uid": "uid", "agent": "policy"}


def ready(step, position, *, base=None, version=None, name=""):
    base = step if base is None else base
    index = 10 * step + position
    place = {"step": step, "position": position, "group": name or f"uid-t{index}", "index": index}
    versions = {"base_version": base, "version": base if version is None else version}
    played = TrajectoryRef(member=0, episode="e", leaves=(0,), reward=1.0)
    return GroupReady(**IDS, **place, **versions, trajectories=(played,))


def closed(step, num_groups, base=None):
    return AgentClosed(**IDS, step=step, base_version=step if base is None else base, num_groups=num_groups)


def drain(inbox):
    done = []
    while True:
        if (group := inbox.next_group()) is not None:
            done.append(group.group)
            inbox.take(group)
        elif (due := inbox.due()) is not None:
            done.append(f"step {due.step}: {' '.join(inbox.consumed())}")
            inbox.commit(due.step, inbox.version + 1)
        else:
            return done


def train(inbox, messages):
    for message in messages:
        inbox.add(message)
        drain(inbox)


WHOLE: Log = [ready(0, 0), ready(0, 1), closed(0, 2), ready(1, 0), closed(1, 1)]
TRAINED = ["uid-t0", "uid-t1", "step 0: uid-t0 uid-t1", "uid-t10", "step 1: uid-t10"]


@given(order=st.permutations(range(len(WHOLE))), repeats=st.lists(st.integers(0, len(WHOLE) - 1), max_size=8))
def test_in_whatever_order_and_however_often_messages_of_two_steps_come_each_is_trained_once(order, repeats):
    inbox, done = StepInbox(-1, 0), []
    for number in [*order, *repeats]:
        inbox.add(WHOLE[number])
        done += drain(inbox)
    assert done == TRAINED


@pytest.mark.parametrize(("committed", "left"), [(-1, TRAINED), (0, TRAINED[3:]), (1, [])])
def test_steps_that_are_committed_already_are_ignored(committed, left):
    inbox = StepInbox(committed, committed + 1)
    for message in WHOLE:
        assert inbox.is_committed(message) == (message.step <= committed)
        inbox.add(message)
    assert drain(inbox) == left


def test_a_step_without_signal_is_skipped_by_number_and_not_by_version():
    inbox = StepInbox(0, 1)
    for message in (ready(3, 0, base=1), closed(3, 1, base=1)):
        inbox.add(message)
    assert drain(inbox) == ["uid-t30", "step 3: uid-t30"]
    assert (inbox.committed_step, inbox.version) == (3, 2)


def test_after_a_step_that_trained_no_token_the_next_one_goes_on_at_the_old_version():
    inbox, of_step_1 = StepInbox(-1, 0), {"follows": 0}
    inbox.add(ready(1, 0).model_copy(update=of_step_1))
    assert inbox.has_gap
    inbox.commit(0, 0)
    inbox.add(closed(1, 1).model_copy(update=of_step_1))
    assert (inbox.has_gap, drain(inbox)) == (False, ["uid-t10", "step 1: uid-t10"])


@pytest.mark.parametrize(("groups", "closes", "text"), rows(__file__, "contradicting_logs"))
def test_a_log_that_contradicts_itself_or_the_version_is_refused(groups, closes, text):
    messages: Log = [ready(0, position).model_copy(update=changes) for position, changes in groups]
    messages += [closed(0, num_groups).model_copy(update=changes) for num_groups, changes in closes]
    with pytest.raises(LogInvalid, match=text):
        train(StepInbox(-1, 0), messages)
