from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from marlaas_worker.rollout.output_buffer import OutputBuffer


class Logprobs(NamedTuple):
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: None = None


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finished: bool = False


def token(request, number, *, finished=False):
    logprobs = Logprobs(np.array([[number]]), np.array([[-0.5 * number]], np.float32), np.array([number + 7]))
    return Output(request, [number], logprobs, finished)


def test_the_first_token_is_sent_at_once_and_the_others_with_the_last_one():
    buffer = OutputBuffer()
    first, second = token("a", 1), token("b", 1)
    assert buffer.pass_on([first, second]) == [first, second]
    assert buffer.pass_on([token("a", 2), token("b", 2)]) == []
    assert buffer.pass_on([token("b", 3)]) == []
    (last,) = buffer.pass_on([token("a", 3, finished=True), token("b", 4)])
    assert (last.request_id, last.new_token_ids, last.finished) == ("a", [2, 3], True)
    assert last.new_logprobs.logprob_token_ids.tolist() == [[2], [3]]
    assert last.new_logprobs.logprobs.tolist() == [[-1.0], [-1.5]]
    assert last.new_logprobs.logprobs.dtype == np.float32
    assert last.new_logprobs.sampled_token_ranks.tolist() == [9, 10]
    assert len(buffer) == 1


def test_a_request_of_one_token_and_one_that_ends_without_a_token_are_sent_as_they_are():
    buffer = OutputBuffer()
    only = token("a", 1, finished=True)
    assert buffer.pass_on([only]) == [only]
    buffer.pass_on([token("b", 1)])
    buffer.pass_on([token("b", 2)])
    (last,) = buffer.pass_on([Output("b", [], finished=True)])
    assert last.new_token_ids == [2]
    assert last.new_logprobs.logprobs.tolist() == [[-1.0]]
    assert len(buffer) == 0


def test_a_request_without_logprobs_has_none_and_an_aborted_one_leaves_nothing():
    buffer = OutputBuffer()
    buffer.pass_on([Output("a", [1]), Output("b", [1])])
    buffer.pass_on([Output("a", [2]), Output("b", [2])])
    buffer.forget(["b", "unknown"])
    (last,) = buffer.pass_on([Output("a", [3], finished=True)])
    assert (last.new_token_ids, last.new_logprobs) == ([2, 3], None)
    assert len(buffer) == 0
