"""The usage of a job equals numbers that were computed by hand."""

import pytest
from tests.harness import a_progress, a_step, job_document

from marlaas.episodes.record import joined
from marlaas.episodes.usage import sums_by_tenant, usage_of
from marlaas_api.messages import FaultClass, Meter, UsageAmounts
from marlaas_api.messages.agent_settings import PolicySettings
from marlaas_api.names import Split, eval_group
from marlaas_api.wire import pack_ids


@pytest.fixture
def document():
    return job_document("reverse", uid="uid-1", tenant="acme")


@pytest.fixture
def steps(document):
    """One step with groups 0, 1 and 2. Group 2 was too stale; it has two episodes of 5 tokens."""
    return [a_step(document, 0, num_episodes=6, num_dropped=1, dropped_tokens=10, indices=(0, 1, 2))]


@pytest.fixture
def play(episode, turn):
    def build(tokens, *place: object, **fields: object):
        one = episode(*place, **fields)
        meter = Meter(prompt_tokens=20, cached_tokens=16, output_tokens=tokens, queue_s=0.1, engine_s=0.2)
        return joined(one, [turn(one, output_ids=pack_ids(list(range(tokens))), meter=meter)])

    return build


@pytest.fixture
def records(ref, play):
    held_out = {"split": Split.EVAL, "group": eval_group(ref, 7, 3)}
    return [
        play(1, 0, 0, 1.0),
        play(2, 0, 1, 0.0),
        play(30, 1, 0, 1.0),  # no advantage
        play(40, 1, 1, 1.0),
        play(5, 2, 0, 1.0),  # too stale
        play(5, 2, 1, 0.0),
        play(600, 0, 1, 0.0, attempt=2),  # played before
        play(700, 1, 2, fault=FaultClass.ENV, fault_text="boom", rewards={}),
        play(8000, 7, 0, 0.25, **held_out),
        play(90000, 3, 0, 1.0),  # of a step that has not finished
    ]


def test_the_parts_of_the_agents_are_the_whole_and_a_player_counts_for_its_policy(document, episode, turn, steps):
    (policy,) = document.spec.agents
    second = policy.model_copy(update={"name": "second", "policy": PolicySettings(of="policy")})
    agents = (policy, second, policy.model_copy(update={"name": "critic"}))
    document = document.model_copy(update={"spec": document.spec.model_copy(update={"agents": agents})})
    used = {"critic": UsageAmounts(stale_tokens=7, trainer_s=2.5), "policy": UsageAmounts(trainer_s=1.5)}
    records = []
    for member in range(2):
        one = episode(0, member, rewards=dict.fromkeys(("policy", "second", "critic"), float(member)), duration_s=3.0)
        ids = [pack_ids(list(range(size))) for size in (3, 20, 100)]
        records.append(joined(one, [turn(one, n, agent=agents[n].name, output_ids=own) for n, own in enumerate(ids)]))
    steps = [steps[0].model_copy(update={"dropped_tokens": 7, "usage": used})]
    held = {name: UsageAmounts(slot_s=s, stored_bytes=b) for name, s, b in (("policy", 5.0, 70), ("critic", 2.5, 11))}
    told = a_progress(document, tokens=300, accelerator_s=9.0, trainer_s=4.0, usage=held)
    row = usage_of(document, records, steps, told)
    assert row.agents.keys() == {"policy", "critic"}
    own, critic = row.agents["policy"], row.agents["critic"]
    assert (own.generated_tokens, own.trained_tokens, own.sandbox_s, own.trainer_s) == (46, 46, 4.0, 1.5)
    assert (critic.generated_tokens, critic.trained_tokens, critic.stale_tokens) == (200, 193, 7)
    assert (critic.sandbox_s, critic.trainer_s, critic.engine_s, own.engine_s) == (2.0, 2.5, 0.25, 0.5)
    assert (row.amounts.generated_tokens, row.amounts.unrecorded_tokens, row.amounts.engine_s) == (300, 54, 9.0)
    assert (own.slot_s, own.stored_bytes, critic.slot_s, critic.stored_bytes) == (5.0, 70, 2.5, 11)
    parts = own + critic
    assert (parts.slot_s, parts.stored_bytes) == (row.amounts.slot_s, row.amounts.stored_bytes)
    assert (parts.prompt_tokens, parts.sandbox_s) == (row.amounts.prompt_tokens, row.amounts.sandbox_s)


def test_every_generated_token_is_counted_once_by_its_use_and_tenants_have_the_sum(document, records, steps):
    amounts = usage_of(document, records, steps, None).amounts
    assert (amounts.trained_tokens, amounts.zero_variance_tokens, amounts.stale_tokens) == (3, 70, 10)
    assert (amounts.repeated_tokens, amounts.failed_tokens) == (600, 700)
    assert (amounts.evaluation_tokens, amounts.open_tokens, amounts.unrecorded_tokens) == (8000, 90000, 0)
    assert amounts.generated_tokens == 3 + 70 + 10 + 600 + 700 + 8000 + 90000
    assert amounts.wasted_tokens == 70 + 10 + 600 + 700
    assert (amounts.prompt_tokens, amounts.cached_tokens) == (200, 160)
    assert amounts.sandbox_s == pytest.approx(10 * 0.5)
    assert usage_of(document, [*records, *records], steps, None).amounts == amounts, "an episode that is read twice"
    one, other = usage_of(document, records, steps, None), usage_of(document, records[:2], steps, None)
    sums = sums_by_tenant([one, other])
    assert list(sums) == ["acme"]
    assert sums["acme"].generated_tokens == 99383 + 3
    assert sum(sums.values(), UsageAmounts()) == one.amounts + other.amounts


def test_tokens_of_engines_that_are_in_no_episode_are_told(document, records, steps):
    kept = {"policy": UsageAmounts(stored_bytes=7)}
    fields = {"accelerator_s": 1.5, "trainer_s": 2.5, "admitted_s": 60.0, "usage": kept}
    amounts = usage_of(document, records, steps, a_progress(document, tokens=100000, **fields)).amounts
    assert (amounts.generated_tokens, amounts.unrecorded_tokens) == (100000, 100000 - 99383)
    assert (amounts.engine_s, amounts.trainer_s, amounts.admitted_s, amounts.stored_bytes) == (1.5, 2.5, 60.0, 7)
    cut = {"policy": UsageAmounts(preempted_tokens=100, preempted_engine_s=0.25)}
    more = {"usage": cut, "preempted_tokens": 17, "preempted_engine_s": 0.5}
    preempted = a_progress(document, tokens=100000, **(fields | more))
    amounts = usage_of(document, records, steps, preempted).amounts
    assert (amounts.preempted_tokens, amounts.unrecorded_tokens) == (117, 100000 - 99383 - 117)
    assert (amounts.charged_tokens, amounts.charged_engine_s) == (100000 - 117, 0.75)
    fewer = usage_of(document, records, steps, a_progress(document, tokens=5)).amounts
    assert (fewer.generated_tokens, fewer.unrecorded_tokens) == (99383, 0), "recorded turns are certain"
