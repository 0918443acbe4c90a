"""Quotas: what they refuse, what the messages say and how rarely they change, and when a tenant's jobs pause."""

import pytest
from tests.harness import a_progress

from marlaas_api.messages import TenantQuota
from marlaas_worker.orchestrator.quota import TOKEN_WINDOW_S, Pacing, QuotaMessages, Quotas


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        ({}, ""),
        ({"jobs": 2}, "over quota: 2 of 2 jobs"),
        ({"jobs": 3}, ""),
        ({"jobs": 0}, "over quota: 2 of 0 jobs"),
        ({"adapter_slots": 2}, "over quota: 2 of 2 adapter slots, and it needs 1"),
        ({"adapter_slots": 3}, ""),
        (
            {"storage": "3Gi"},
            "over quota: 3.0 of 3.0 GiB stored; delete jobs with adapterRetention: delete, or have the quota raised",
        ),
        ({"storage": "4Gi"}, ""),
        ({"tokens_per_second": 1.0, "trainer_seconds_per_hour": 1.0}, ""),
    ],
)
def test_a_quota_refuses_what_would_exceed_it_with_both_numbers(document, quota, words):
    quotas = Quotas({"team-a": TenantQuota(**quota)}, [document("one"), document("two")], {"team-a": 3 << 30})
    assert quotas.refusal(document("three")) == words
    assert quotas.refusal(document("x").model_copy(update={"tenant": "without-a-quota"})) == ""


def test_the_message_names_the_job_that_is_nearest_to_its_end(document):
    running = {name: a_progress(document(name), step=step, steps=40) for name, step in (("near", 38), ("far", 1))}
    text = QuotaMessages().message(document("waits"), "over quota", running, 0.0)
    assert text == "over quota; waits for team-a/near, 38 of 40 steps"
    assert QuotaMessages().message(document("waits"), "over quota", {"x": None}, 0.0) == "over quota"


class Meter:
    """A pacing whose tenant uses a given number of tokens and trainer seconds each second."""

    def __init__(self, **quota) -> None:
        self.pacing, self.quota = Pacing(), TenantQuota(**quota)
        self.total, self.now = (0.0, 0.0), 0.0

    def run(self, seconds: int, tokens: float = 0.0, trainer_s: float = 0.0) -> int:
        """Return the number of seconds in which the tenant paused; it uses nothing then."""
        paused = 0
        for _ in range(seconds):
            self.now += 1.0
            gained = (0.0, 0.0) if self.pacing.reason("a") else (tokens, trainer_s)
            paused += gained == (0.0, 0.0)
            self.total = self.total[0] + gained[0], self.total[1] + gained[1]
            self.pacing.update({"a": self.quota}, {"a": gained}, self.now)
        return paused


def test_a_tenant_below_its_rates_never_pauses():
    assert Meter(tokens_per_second=100.0, trainer_seconds_per_hour=1800.0).run(3600, 99.0, 0.49) == 0


@pytest.mark.parametrize(
    ("quota", "allowed", "words"),
    [
        ({"tokens_per_second": 100.0}, 100.0 * 3600, "100 tokens a second"),
        ({"trainer_seconds_per_hour": 900.0}, 900.0, "900 trainer seconds an hour"),
    ],
)
def test_a_tenant_above_a_rate_pauses_until_its_average_is_the_rate(quota, allowed, words):
    meter, which = Meter(**quota), "trainer_seconds_per_hour" in quota
    meter.run(3600, 400.0, 1.0)
    before = meter.total[which]
    meter.run(3600, 400.0, 1.0)
    assert meter.total[which] - before == pytest.approx(allowed, rel=0.02)
    while not meter.pacing.reason("a"):
        meter.run(1, 400.0, 1.0)
    begins = "it begins no new tasks until the average is lower, in about 1 minute"
    assert meter.pacing.reason("a") == f"over quota of tenant a: more than {words} on average; {begins}"


@pytest.mark.parametrize(
    ("rate", "seconds_over", "words"),
    [
        (2.0, 50, "in about 1 minute"),
        (2.0, 119, "in about 2 minutes"),
        (2.0, 600, "in about 10 minutes"),
        (2.0, 1801, "in about 2 hours"),
        (2.0, 86400, "in about 24 hours"),
        (1.0, 1e9, "in more than 24 hours"),
        (0.0, 1e9, "in more than 24 hours"),
    ],
)
def test_the_message_of_a_rate_says_roughly_how_long_its_pause_is(rate, seconds_over, words):
    meter = Meter(tokens_per_second=rate)
    meter.run(1, (rate or 1.0) * (TOKEN_WINDOW_S + seconds_over))
    assert meter.pacing.reason("a").endswith(f"until the average is lower, {words}")


def test_a_tenant_that_has_no_job_for_a_while_comes_back_to_what_is_left_of_its_level():
    meter = Meter(tokens_per_second=1.0)
    meter.run(1, 2 * TOKEN_WINDOW_S + 10)
    for away_s, pauses in ((TOKEN_WINDOW_S, True), (2 * TOKEN_WINDOW_S + 10, False)):
        meter.pacing.update({}, {}, meter.now + away_s)
        assert not meter.pacing.reason("a"), "it has no quota"
        meter.pacing.update({"a": meter.quota}, {}, meter.now)
        assert bool(meter.pacing.reason("a")) is pauses, "time does not run backwards, and an empty level is forgotten"
