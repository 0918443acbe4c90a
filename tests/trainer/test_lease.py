"""Who may train an agent."""

import pytest

from marlaas_api.blobs import BlobRef
from marlaas_api.messages import PolicyRecord
from marlaas_worker.trainer.assignment import GRACE_S, KEPT_S, Absences, Recent, bound_record, may_bind

MANIFEST = BlobRef(name="m", sha256="0" * 64, size_bytes=1)
HELD = PolicyRecord(uid="uid", version=3, manifest=MANIFEST, epoch=5, holder="trainer-0", step=4)


@pytest.mark.parametrize(
    ("record", "gone", "allowed"),
    [
        (None, False, True),
        (HELD.model_copy(update={"uid": "earlier"}), False, True),
        (HELD.model_copy(update={"holder": "trainer-1"}), False, True),
        (HELD.model_copy(update={"holder": ""}), False, True),
        (HELD, True, True),
        (HELD, False, False),
    ],
    ids=["nobody", "another job", "itself", "released", "holder gone", "holder alive"],
)
def test_an_agent_may_be_bound_if_nobody_alive_holds_it_for_this_job(record, gone, allowed):
    assert may_bind(record, "uid", "trainer-1", gone) == allowed


def test_a_bind_bumps_the_epoch_keeps_what_is_true_and_begins_afresh_for_another_job_of_the_name():
    assert bound_record(HELD, "uid", "trainer-1") == HELD.model_copy(update={"epoch": 6, "holder": "trainer-1"})
    assert bound_record(HELD, "new", "trainer-1") == PolicyRecord(uid="new", epoch=6, holder="trainer-1")
    assert bound_record(None, "new", "trainer-1") == PolicyRecord(uid="new", epoch=0, holder="trainer-1")


def test_a_holder_is_gone_once_it_has_been_absent_for_the_whole_grace_period_without_a_break():
    absences = Absences()
    absences.observe({"a", "b"}, {"b"}, 100.0)
    assert not absences.gone("a", 100.0 + GRACE_S - 0.1)
    assert absences.gone("a", 100.0 + GRACE_S)
    assert not absences.gone("b", 1e9)
    absences.observe({"a"}, {"a"}, 103.0)
    absences.observe({"a"}, set(), 104.0)
    assert not absences.gone("a", 103.0 + GRACE_S)
    absences.forget()
    absences.observe({"a"}, set(), 200.0)
    assert not absences.gone("a", 200.0), "what was not seen during an outage counts for nothing"


def test_figures_of_a_job_are_kept_for_a_minute_after_its_document_is_gone() -> None:
    recent = Recent()
    assert recent.of({"a", "b"}, 0.0) == {"a", "b"}
    assert recent.of({"a"}, KEPT_S) == {"a", "b"}
    assert recent.of({"a"}, KEPT_S + 1.0) == {"a"}
