"""Every algorithm against numbers from paper and pencil, and against its paper's formula written out slowly."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.rl.papers import CAP, FORMS, NONE, arithmetic, config_of, f64, moved, normalised, random_record, record_of
from tests.tables import rows as rows_of

from marlaas_worker.rl.algorithms import ALGORITHMS, Algorithm
from marlaas_worker.rl.corrections import CAPS, Bounds
from marlaas_worker.rl.losses import TokenRecord, policy_loss

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)

# Three sequences: better than expected and above every clip; worse and below; a long one whose ratios multiply to 1.
BATCH = [(1.0, [1.5, 1.0]), (-2.0, [0.5]), (1.0, [2.0, 0.5, 1.0, 1.0])]


# The proximal policy of the same tokens: some of what moved r is staleness, the rest the step's own.
PROXIMAL = [1.5, 2.5, 0.5, 1.0, 0.5, 4.0, 1.0]


@pytest.mark.parametrize(("ratio", "algorithm", "objective", "slopes"), rows_of(__file__, "by_hand"))
def test_the_objective_and_its_slopes_are_the_ones_computed_by_hand(ratio, algorithm, objective, slopes):
    correction = NONE if ratio == "behaviour" or algorithm == "cispo" else Bounds("truncated", 2.0)
    loss, gradient = normalised(moved(record_of(BATCH), PROXIMAL), config_of(algorithm, correction, ratio=ratio))
    assert loss == pytest.approx(-arithmetic(objective))
    assert torch.allclose(-gradient, f64([arithmetic(one) for one in slopes]), rtol=1e-12, atol=1e-15)


def test_gspo_weighs_a_sequence_by_one_number_and_clips_by_another():
    # pi_prox / mu: sqrt(2 * 4.5) = 3, held at 2, and pi / pi_prox: sqrt(1/2 * 2) = 1; then 1/4 and 1.1, held at 1.0004
    record = moved(record_of([(1.0, [1.0, 9.0]), (3.0, [0.275])]), [2.0, 4.5, 0.25])
    loss, gradient = normalised(record, config_of("gspo", Bounds("truncated", 2.0), ratio="proximal"))
    assert loss == pytest.approx(-(2.0 * 1.0 + 0.25 * 1.0004 * 3.0) / 2)
    assert torch.allclose(gradient, f64([-2.0 / 4, -2.0 / 4, 0.0]))


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("spread", [1e-4, 0.05, 0.6])
@pytest.mark.parametrize("algorithm", NAMES)
def test_the_gradient_is_that_of_the_papers_formula_written_slowly(algorithm, spread, ratio):
    correction = Bounds("truncated", CAP) if ratio == "proximal" and algorithm != "cispo" else NONE
    for seed in range(5):
        record = random_record(seed=seed, spread=spread)
        draw = torch.Generator().manual_seed(seed)
        between = spread * torch.randn(len(record.trainer), generator=draw, dtype=torch.float64)
        proximal = record.behaviour + between if seed else record.trainer.detach()
        record = replace(record, proximal=proximal)
        leaves = [value.detach().clone().requires_grad_() for value in record.trainer]
        batch = []
        for number in range(9):
            places = torch.nonzero(record.sequences == number).flatten().tolist()
            mu, prox = ([part[place].item() for place in places] for part in (record.behaviour, proximal))
            batch.append(([leaves[place] for place in places], mu, prox, record.advantages[places[0]].item()))
        FORMS[ratio][algorithm](batch).backward()  # type: ignore[no-untyped-call]
        expected = torch.stack([torch.zeros(()).double() if leaf.grad is None else leaf.grad for leaf in leaves])
        found = normalised(record, config_of(algorithm, correction, ratio=ratio))[1]
        assert torch.allclose(-found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
def test_distillation_has_the_gradient_of_the_exact_reverse_kl_however_stale_its_tokens(ratio):
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, generator=draw, dtype=torch.float64)
    behaviour, teacher = (torch.log_softmax(one, 0) for one in logits[:2])
    student = logits[2].clone().requires_grad_()
    config = config_of("distill", Bounds("truncated", 1e9), ratio=ratio, clip_low=1.0, clip_high=1e9)
    expected = torch.log_softmax(student, 0)
    exact = (expected.exp() * (expected - teacher)).sum()
    mean = torch.zeros((), dtype=torch.float64)
    for token in range(7):  # every token, by its probability under the policy that samples
        trainer = torch.log_softmax(student, 0)[token : token + 1]
        graded = (teacher - behaviour)[token : token + 1]
        one = torch.zeros(1, dtype=torch.int64)
        record = TokenRecord(trainer, behaviour[token : token + 1], graded, one, one + 1)
        loss, sums = policy_loss(record, config)
        assert sums.metrics()["teacher_kl"] == pytest.approx((trainer - teacher[token]).item())
        mean = mean + behaviour[token].exp() * loss
    found, wanted = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (mean, exact))
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-14)


def cut(record):
    """The same trajectories, of which every second token is in another segment."""
    return replace(record, sequences=2 * record.sequences + torch.arange(len(record.sequences)) % 2)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("algorithm", [name for name in NAMES if name != "gspo"])
def test_an_episode_weighs_the_same_in_however_many_segments_it_comes(algorithm, ratio):
    record = random_record(spread=0.5)
    config = config_of(algorithm, Bounds("truncated", 1.5), ratio=ratio)
    (loss, gradient), (expected, slopes) = normalised(cut(record), config), normalised(record, config)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(gradient, slopes, rtol=1e-12, atol=0)
    assert policy_loss(cut(record), config)[1].metrics()["sequences"] == 9


def test_gspo_takes_a_ratio_for_each_segment_and_weighs_it_by_its_share_of_the_trajectory():
    whole = record_of([(1.0, [0.5, 0.5, 0.25, 1.0, 1.0]), (1.0, [1.0])])  # one trajectory of 5 tokens, one of 1
    record = replace(whole, sequences=torch.tensor([0, 0, 1, 1, 1, 2]))
    loss, gradient = normalised(record, config_of("gspo"))
    second = 0.25 ** (1 / 3)
    assert loss == pytest.approx(-(2 / 5 * 0.5 + 3 / 5 * second + 1.0) / 2)
    assert gradient.tolist() == pytest.approx([-0.5 / 10] * 2 + [-second / 10] * 3 + [-1 / 2])


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def rows(header):
    """Cells of the page's table with this first header."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"| {header} |")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_pages_tables_are_the_registry_the_caps_and_the_words():
    found = {cells[0]: cells[1:7] for cells in rows("algorithm")}
    for name, rule in ALGORITHMS.items():
        clip = (
            "none" if rule.surrogate in ("weighted", "likelihood") else ", ".join(f"{bound:g}" for bound in rule.clip)
        )
        assert found.pop(name) == [rule.advantage, rule.over, rule.ratio, rule.surrogate, rule.normaliser, clip]
    assert not found
    assert {cells[0]: cells[2] for cells in rows("`correction.type`")} == {
        **{name: f"{cap:g}" for name, cap in CAPS.items()},
        "none": "",
    }
    assert {cells[1] for cells in rows("you have")} == set(ALGORITHMS)
    words = {cells[0] for cells in rows("word")}
    for rule in ALGORITHMS.values():
        assert {rule.advantage, rule.surrogate, f"ratio of a {rule.ratio}", f"mean over {rule.normaliser}"} <= words
