"""Whose work goes to the compute thread next, with a simulated clock."""

import random

import pytest

from marlaas_worker.trainer.turns import CREDIT_S, ComputeAccount, Turns

STEP_S, QUANTUM_S = 0.1, 0.25


def agent(name: str, tenant: str = "", job: str = "") -> ComputeAccount:
    return ComputeAccount(tenant or name, job or name, name)


def order(turns: Turns[str], seconds: float = STEP_S) -> list[str]:
    """Serve all that waits."""
    served = []
    while (ticket := turns.next()) is not None:
        served.append(ticket.item[2])
        turns.settle(ticket, seconds)
    return served


def serve(accounts: list[ComputeAccount], duration_s: float, turns: Turns[str], seed: int = 0) -> dict[str, float]:
    """Seconds by tenant when every agent always has more work, whose time differs from its estimate."""
    draw, served, now = random.Random(seed), dict.fromkeys((one.tenant for one in accounts), 0.0), 0.0
    for account in accounts:
        turns.hold(account, True)
        turns.push(account, "", 100)
    while now < duration_s:
        ticket = turns.next()
        assert ticket is not None, "there is work, and the thread is idle"
        account, seconds = ticket.item[0], draw.uniform(0.01, STEP_S)
        turns.settle(ticket, seconds)
        turns.push(account, "", 100)
        served[account.tenant] += seconds
        now += seconds
    order(turns, 0.0)
    for account in accounts:
        turns.hold(account, False)
    return served


def test_the_agent_that_computed_last_keeps_the_turn_for_a_quantum() -> None:
    turns: Turns[str] = Turns(QUANTUM_S)
    for number in range(5):
        for name in ("a", "b"):
            turns.push(agent(name), f"{name}{number}")
    assert order(turns) == ["a0", "a1", "a2", "b0", "b1", "b2", "a3", "a4", "b3", "b4"]


def test_without_a_quantum_agents_alternate() -> None:
    turns: Turns[str] = Turns(0.0)
    for number in range(3):
        for name in ("a", "b"):
            turns.push(agent(name), f"{name}{number}")
    assert order(turns) == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("seed", range(5))
def test_two_tenants_get_seconds_by_weight_within_the_bound(seed: int) -> None:
    turns: Turns[str] = Turns(QUANTUM_S)
    turns.set_weight("light", 1.0)
    turns.set_weight("heavy", 3.0)
    served = serve([agent("one", "light"), agent("two", "heavy")], 60.0, turns, seed)
    largest = QUANTUM_S + 2 * STEP_S  # a quantum and the micro-batch that exceeds it, and the error of one estimate
    assert abs(served["light"] / 1.0 - served["heavy"] / 3.0) <= largest * (1.0 + 1 / 3.0)


def test_thirty_jobs_gain_a_tenant_nothing_over_one() -> None:
    many = [agent(f"many-{number}", "many") for number in range(30)]
    served = serve([*many, agent("one", "few")], 60.0, Turns(QUANTUM_S))
    assert abs(served["many"] - served["few"]) <= 2 * (QUANTUM_S + 2 * STEP_S)


def test_a_change_of_weight_takes_effect_for_later_work() -> None:
    turns: Turns[str] = Turns(QUANTUM_S)
    accounts = [agent("one", "a"), agent("two", "b")]
    before = serve(accounts, 20.0, turns)
    turns.set_weight("a", 4.0)
    after = serve(accounts, 20.0, turns)
    assert before["a"] == pytest.approx(10.0, abs=1.0)
    assert after["a"] == pytest.approx(16.0, abs=1.0)


def test_an_agent_with_held_groups_keeps_its_credit_and_one_without_does_not() -> None:
    for holds in (True, False):
        turns: Turns[str] = Turns(0.0)
        waiting, busy = agent("waiting"), agent("busy")
        if holds:
            turns.hold(waiting, True)
            turns.hold(waiting, True)
        serve([busy], 5.0, turns)
        for number in range(3):
            turns.push(waiting, f"w{number}")
            turns.push(busy, f"b{number}")
        served = order(turns)
        assert (served[:3] == ["w0", "w1", "w2"]) == holds
        assert sorted(served) == ["b0", "b1", "b2", "w0", "w1", "w2"]


def test_withdrawn_work_is_neither_done_nor_charged() -> None:
    turns: Turns[str] = Turns(QUANTUM_S)
    kept, dropped = turns.push(agent("a"), "kept"), turns.push(agent("b"), "dropped")
    turns.withdraw(dropped)
    assert turns.usage("b") == 0.0
    assert order(turns) == ["kept"]
    assert not kept.is_queued


def test_an_agent_whose_groups_hang_has_the_thread_for_a_bounded_time_afterwards() -> None:
    turns: Turns[str] = Turns(0.0)
    hangs, busy = agent("hangs"), agent("busy")
    turns.hold(hangs, True)
    serve([busy], 10 * CREDIT_S, turns)
    for _ in range(2000):
        turns.push(busy, "busy")
        turns.push(hangs, "hangs")
    served = order(turns)
    assert CREDIT_S / 2 - 1 <= STEP_S * served.index("busy") <= CREDIT_S / 2 + 1, "two tenants have credit"


def test_an_agent_with_much_work_does_not_delay_its_siblings() -> None:
    turns: Turns[str] = Turns(0.0)
    for number in range(10):
        turns.push(agent("floods", "tenant", "job"), f"f{number}")
    turns.push(agent("calm", "tenant", "job"), "calm")
    assert order(turns).index("calm") == 1


def test_weights_are_kept_for_the_tenants_that_have_work() -> None:
    turns: Turns[str] = Turns(0.0)
    for tenant in ("a", "b"):
        turns.set_weight(tenant, 2.0)
    turns.keep_weights({"a"})
    assert turns._weights == {"a": 2.0}
    with pytest.raises(ValueError, match="tenant a has weight 0"):
        turns.set_weight("a", 0)
