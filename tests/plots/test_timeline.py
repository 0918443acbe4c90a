import importlib.util
from pathlib import Path

import pytest

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.plots.series import timeline, union
from marlaas_api.messages import StopReason
from marlaas_api.names import Split

_spec = importlib.util.spec_from_file_location("plots_records", Path(__file__).with_name("test_series.py"))
_records = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_records)
step = _records.step


def _turn(number: int, at: float, engine_s: float, queue_s: float = 0.0) -> TurnRecord:
    return TurnRecord(
        agent="policy",
        turn=number,
        version=0,
        append="x",
        text="y",
        stop_reason=StopReason.STOP,
        at=at,
        engine_s=engine_s,
        queue_s=queue_s,
    )


def _episode(at: float, *turns: TurnRecord) -> EpisodeRecord:
    return EpisodeRecord(episode="e", group="u-t0", split=Split.TRAIN, index=0, member=0, at=at, turns=turns)


@pytest.mark.parametrize(
    ("intervals", "gap_s", "joined"),
    [
        ([], 0.0, ()),
        ([(3, 4), (1, 2)], 0.0, ((1, 2), (3, 4))),
        ([(1, 3), (2, 5), (2.5, 3)], 0.0, ((1, 5),)),
        ([(1, 2), (2.4, 3)], 0.5, ((1, 3),)),
        ([(2, 2), (4, 3)], 0.0, ()),
    ],
)
def test_intervals_become_disjoint_and_in_order(intervals, gap_s, joined):
    assert union(intervals, gap_s) == joined


def test_engine_environment_and_trainer_are_where_the_record_says():
    episodes = [
        _episode(21.0, _turn(0, 12.0, 2.0), _turn(1, 20.0, 1.0, queue_s=3.0)),
        _episode(13.0, _turn(0, 13.0, 2.0)),
    ]
    one = timeline("a", episodes, [step(0, metrics={"train_s": 4.0}, at=30.0, wall_s=30.0)])
    assert (one.begin, one.end) == (0.0, 30.0)
    assert one.engine == ((10.0, 13.0), (19.0, 20.0))
    assert one.environment == ((12.0, 16.0), (20.0, 21.0))
    assert one.trainer == ((26.0, 30.0),)
    assert one.share(one.engine) == pytest.approx(4 / 30)


def test_what_nobody_recorded_is_not_drawn_as_idle():
    one = timeline("a", [_episode(12.0, _turn(0, 12.0, 2.0))], [step(0)])
    assert one.trainer is None
    assert timeline("a", [], [step(0)]) is None
    only = timeline("a", [], [step(0, metrics={"train_s": 4.0})])
    assert (only.engine, only.environment) == (None, None)
