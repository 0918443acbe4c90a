"""`bench quality`: the paired difference of held-out rewards, against numbers by hand."""

from bench.multitenant_figures import Events, JobEvents
from bench.quality import evals, row


def test_the_difference_is_paired_by_job():
    alone = {"a": (0.1, 0.9), "b": (0.3, 0.7)}
    together = {"b": (0.3, 0.65), "a": (0.1, 0.93)}
    found = row("0", alone, together)
    # Differences 0.03 and -0.05: mean -0.01, standard deviation 0.08 / √2, standard error 0.04.
    assert found == ["0", "2", "0.200", "0.800", "0.790", "-0.0100", "0.0400", "met"]
    assert row("0", alone, {job: (0.0, after + 0.021) for job, (_, after) in alone.items()})[-1] == "missed"


def test_evaluations_before_and_after_training_count():
    events = Events({"team-0/job-00": JobEvents("team-0", (), (), (0.1, 0.5, 0.8))})
    assert evals(events) == {"team-0/job-00": (0.1, 0.8)}
