"""Packing: the same micro-batches however segments arrive, and padding that changes nothing."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from marlaas_worker.trainer.batching import Segment, collate, in_training_order, pack

lengths = st.lists(st.integers(2, 40), max_size=30)


def segment(length: int, advantage: float = 1.0) -> Segment:
    generated = np.arange(length) % 3 == 1
    behaviour = np.where(generated, -0.1 * np.arange(length), 0).astype(np.float32)
    return Segment(np.arange(length, dtype=np.int32) + 1, generated, behaviour, 0, advantage)


@given(lengths=lengths, cuts=st.lists(st.integers(0, 30), max_size=6), budget=st.integers(16, 200))
def test_microbatches_do_not_depend_on_how_segments_arrive(lengths: list[int], cuts: list[int], budget: int) -> None:
    segments = [segment(length) for length in lengths]
    whole, rest = pack([], segments, budget)
    batches: list[list[Segment]] = []
    pending: list[Segment] = []
    bounds = [0, *sorted(min(cut, len(segments)) for cut in cuts), len(segments)]
    for begin, end in itertools.pairwise(bounds):
        full, pending = pack(pending, segments[begin:end], budget)
        batches += full
    assert [[id(part) for part in batch] for batch in [*batches, pending]] == [
        [id(part) for part in batch] for batch in [*whole, rest]
    ]


@given(lengths=lengths, budget=st.integers(16, 200))
def test_every_segment_is_in_one_microbatch_in_order_and_only_a_lone_one_exceeds_the_budget(
    lengths: list[int], budget: int
) -> None:
    full, rest = pack([], [segment(length) for length in lengths], budget)
    batches = [batch for batch in [*full, rest] if batch]
    assert [len(part) for batch in batches for part in batch] == lengths
    for batch in batches:
        assert len(batch) == 1 or max(map(len, batch)) * len(batch) <= budget


def test_a_group_goes_short_ones_first_and_equal_ones_as_they_were() -> None:
    ordered = in_training_order([segment(9, 1.0), segment(4, 2.0), segment(9, 3.0), segment(2, 4.0)])
    assert [part.advantage for part in ordered] == [4.0, 2.0, 1.0, 3.0]


def test_a_microbatch_says_where_its_generated_tokens_are_and_whose_they_are() -> None:
    batch = collate([segment(3, 1.5), segment(6, -2.0)])
    assert batch.ids.tolist() == [[1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert list(zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)) == [(0, 1), (1, 1), (1, 4)]
    assert batch.advantages.tolist() == [1.5, -2.0, -2.0]
    assert np.allclose(batch.behaviour, [-0.1, -0.1, -0.4])
    assert batch.num_padded_tokens == 12


def test_segments_without_generated_tokens_make_an_empty_microbatch() -> None:
    silent = Segment(np.array([1, 2], np.int32), np.zeros(2, np.bool_), np.zeros(2, np.float32), 0, 1.0)
    batch = collate([silent])
    assert len(batch.rows) == len(batch.behaviour) == len(batch.advantages) == 0
