"""A teacher's scores of a student's conversation: the ids to score, from recorded turns, and the record of their logprobs. No I/O.

The ids are those that were fed to the student's engine and sampled by it; no text is tokenized. Each segment of a conversation is one
context. So after the last turn, a conversation is scored in one forward pass per segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlaas_api.messages import GenerateRequest, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef
from marlaas_api.wire import pack_logprobs, unpack_ids
from marlaas_worker.rollout.conversation import NO_IDS, BadAppend, Draft, Ids, Prompt
from marlaas_worker.rollout.turn_log import COPIED, Drawn

SCORE_TEMPERATURE = 1.0
"""Temperature at which engines score (`engine.Engine.score`)."""


class OtherVocabulary(BadAppend):
    """The student's ids have another meaning in the teacher's vocabulary."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One segment of a student's conversation, which is scored in one forward pass.

    ids: all prompts and outputs of its turns, int32 [T]. generated: True for the ids that the student sampled, bool [T].
    """

    ids: Ids
    generated: npt.NDArray[np.bool_]

    def prompt(self, max_model_len: int) -> Prompt:
        """Return the segment as an engine's prompt, cut to max_model_len - 1 ids: engines generate one token with a score.

        max_model_len: the teacher's context window, in tokens.
        """
        return Prompt(Draft(None, "", "", "", opens_segment=True), NO_IDS, self.ids[: max_model_len - 1])

    def of_generated(self, logprobs: Sequence[float]) -> npt.NDArray[np.float32]:
        """Return one logprob for each generated id, float32; NaN for an id that was not scored, because the context window ended before it.

        logprobs: the engine's scores, of the segment's second id and those that follow.
        """
        known = np.full(len(self.ids), np.nan, np.float32)
        known[1 : 1 + len(logprobs)] = logprobs
        return known[self.generated]


def segments(lineage: Sequence[Turn]) -> list[Scored]:
    """Cut a conversation into its segments; the turns of a segment share one context. lineage: the conversation's turns, oldest first."""
    parts: list[list[Turn]] = []
    for turn in lineage:
        if turn.opens_segment or not parts:
            parts.append([])
        parts[-1].append(turn)
    return [_segment(part) for part in parts]


def _segment(turns: Sequence[Turn]) -> Scored:
    pieces = [
        (unpack_ids(ids), is_output)
        for turn in turns
        for ids, is_output in ((turn.prompt_ids, False), (turn.output_ids, True))
    ]
    generated = [np.full(len(ids), is_output) for ids, is_output in pieces]
    return Scored(np.concatenate([ids for ids, _ in pieces]), np.concatenate(generated))


def require_vocabulary(lineage: Sequence[Turn], own: str, teacher: str) -> None:
    """Raise OtherVocabulary unless the ids of all turns are of the teacher's vocabulary.

    Args:
        lineage: turns of the student's conversation.
        own: digest of the teacher's vocabulary.
        teacher: name of the teacher's agent, for the error.
    """
    for turn in lineage:
        if turn.vocabulary != own:
            raise OtherVocabulary(
                f"the tokens of agent {turn.agent!r} are of a vocabulary with digest {turn.vocabulary[:12] or 'unknown'}, and those of its teacher "
                f"{teacher!r} of one with digest {own[:12]}: token ids mean different texts, so the teacher cannot score them. Choose a teacher whose "
                "model has the tokenizer of the student's"
            )


def score_record(
    request: GenerateRequest, adapter: AdapterRef, found: Sequence[tuple[Scored, Drawn]], replica: str, at: float
) -> Turn:
    """Return the turn that records a conversation's scores: the teacher's logprobs of all tokens that the student sampled.

    Args:
        request: asks for the scores.
        adapter: the teacher's version, which gave the scores.
        found: the segments that were scored, oldest first, with the engine's results.
        replica: name of this replica.
        at: now, in unix seconds.
    """
    drawn = [one for _, one in found]
    logprobs = [scored.of_generated(one.completion.logprobs) for scored, one in found]
    return Turn(
        **request.model_dump(include=COPIED),
        scores=request.scores,
        append="",
        version=adapter.version,
        adapter_sha256=next((one.sha256 for one in drawn), ""),
        opens_segment=True,
        prompt_ids=b"",
        output_ids=b"",
        logprobs=pack_logprobs(np.concatenate([np.zeros(0, np.float32), *logprobs]).tolist()),
        text="",
        stop_reason=StopReason.STOP,
        temperature=SCORE_TEMPERATURE,
        meter=Meter(
            prompt_tokens=sum(1 + len(one.completion.logprobs) for one in drawn),
            output_tokens=0,
            queue_s=sum(one.queue_s for one in drawn),
            engine_s=sum(one.engine_s for one in drawn),
            share_s=sum(one.share_s for one in drawn),
        ),
        replica=replica,
        at=at,
    )
