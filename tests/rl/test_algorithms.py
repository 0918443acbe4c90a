"""Every algorithm against numbers from paper and pencil, and against its paper's formula written out slowly."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.rl.papers import CAP, FORMS
from tests.rl.records import NONE, config_of, f64, moved, normalised, random_record, record_of

from marlaas_api.kinds import CorrectionSpec, TrainingSpec
from marlaas_worker.rl.algorithms import ALGORITHMS, Algorithm, Correction, Ratio
from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.rl.losses import TokenRecord, policy_loss

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)

# Three sequences: better than expected and above every clip; worse and below; a long one whose ratios multiply to 1.
BATCH = [(1.0, [1.5, 1.0]), (-2.0, [0.5]), (1.0, [2.0, 0.5, 1.0, 1.0])]


@pytest.mark.parametrize(
    ("algorithm", "objective", "slopes"),
    [
        # (1.2 + 1)/2 - 2 * 0.8 + (1.2 + 0.5 + 1 + 1)/4, over 3 sequences
        ("grpo", (1.1 - 1.6 + 0.925) / 3, [0, 1 / 6, 0, 0, 0.5 / 12, 1 / 12, 1 / 12]),
        ("reinforce++", (1.1 - 1.6 + 0.925) / 3, [0, 1 / 6, 0, 0, 0.5 / 12, 1 / 12, 1 / 12]),
        # the same sums, undivided by lengths: over 3 sequences of a budget of 256
        ("dr-grpo", (2.2 - 1.6 + 3.7) / 768, [0, 1 / 768, 0, 0, 0.5 / 768, 1 / 768, 1 / 768]),
        # held at 1.28 instead of 1.2, over 7 tokens
        ("dapo", (2.28 - 1.6 + 3.78) / 7, [0, 1 / 7, 0, 0, 0.5 / 7, 1 / 7, 1 / 7]),
        # s = sqrt(1.5) is held at 1.0004, 0.5 at 0.9997, and the geometric mean of the third is 1
        ("gspo", (1.0004 - 2 * 0.9997 + 1) / 3, [0, 0, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12]),
        # every token by its ratio, over 3 sequences
        ("rloo", (2.5 - 1 + 4.5) / 3, [1.5 / 3, 1 / 3, -1 / 3, 2 / 3, 0.5 / 3, 1 / 3, 1 / 3]),
        # every token by its ratio up to 5, over 7 tokens
        ("cispo", (2.5 - 1 + 4.5) / 7, [1.5 / 7, 1 / 7, -1 / 7, 2 / 7, 0.5 / 7, 1 / 7, 1 / 7]),
    ],
)
def test_the_objective_and_its_slopes_are_the_ones_computed_by_hand(
    algorithm: Algorithm, objective: float, slopes: list[float]
) -> None:
    loss, gradient = normalised(record_of(BATCH), config_of(algorithm))
    assert loss == pytest.approx(-objective)
    assert torch.allclose(-gradient, f64(slopes), rtol=1e-12, atol=1e-15)


# The proximal policy of the same tokens: some of what moved r is staleness, the rest the step's own.
PROXIMAL = [1.5, 2.5, 0.5, 1.0, 0.5, 4.0, 1.0]


@pytest.mark.parametrize(
    ("algorithm", "objective", "slopes"),
    [
        # weights 1.5, 2, .5 | .5 ... 2: rho is 1, 0.4 | 1 | 2 -> held at 1.2, 1, 0.25, 1
        # (1.5 + 2 * 0.4)/2 - 2 * 0.5 + (1.2 + 0.5 + 2 * 0.25 + 1)/4, over 3 trajectories
        ("grpo", (1.15 - 1.0 + 3.2 / 4) / 3, [1.5 / 6, 0.8 / 6, -1 / 3, 0, 0.5 / 12, 0.5 / 12, 1 / 12]),
        ("dr-grpo", (2.3 - 1.0 + 3.2) / 768, [1.5 / 768, 0.8 / 768, -1 / 768, 0, 0.5 / 768, 0.5 / 768, 1 / 768]),
        ("dapo", (2.3 - 1.0 + 3.28) / 7, [1.5 / 7, 0.8 / 7, -1 / 7, 0, 0.5 / 7, 0.5 / 7, 1 / 7]),
        # no clip: the first token of the third trajectory weighs 1 * 2
        ("rloo", (2.3 - 1.0 + 4.0) / 3, [1.5 / 3, 0.8 / 3, -1 / 3, 2 / 3, 0.5 / 3, 0.5 / 3, 1 / 3]),
        # its ratio stays pi / mu, and it has no correction
        ("cispo", (2.5 - 1 + 4.5) / 7, [1.5 / 7, 1 / 7, -1 / 7, 2 / 7, 0.5 / 7, 1 / 7, 1 / 7]),
    ],
)
def test_with_two_ratios_the_objective_and_its_slopes_are_the_ones_computed_by_hand(
    algorithm: Algorithm, objective: float, slopes: list[float]
) -> None:
    correction = NONE if algorithm == "cispo" else Bounds("truncated", 2.0)
    record = moved(record_of(BATCH), PROXIMAL)
    loss, gradient = normalised(record, config_of(algorithm, correction, ratio="proximal"))
    assert loss == pytest.approx(-objective)
    assert torch.allclose(-gradient, f64(slopes), rtol=1e-12, atol=1e-15)


def test_gspo_weighs_a_sequence_by_one_number_and_clips_by_another() -> None:
    # pi_prox / mu: sqrt(2 * 4.5) = 3, held at 2, and pi / pi_prox: sqrt(1/2 * 2) = 1; then 1/4 and 1.1, held at 1.0004
    record = moved(record_of([(1.0, [1.0, 9.0]), (3.0, [0.275])]), [2.0, 4.5, 0.25])
    loss, gradient = normalised(record, config_of("gspo", Bounds("truncated", 2.0), ratio="proximal"))
    assert loss == pytest.approx(-(2.0 * 1.0 + 0.25 * 1.0004 * 3.0) / 2)
    assert torch.allclose(gradient, f64([-2.0 / 4, -2.0 / 4, 0.0]))


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("spread", [1e-4, 0.05, 0.6])
@pytest.mark.parametrize("algorithm", NAMES)
def test_the_gradient_is_that_of_the_papers_formula_written_slowly(
    algorithm: Algorithm, spread: float, ratio: Ratio
) -> None:
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


@pytest.mark.parametrize("algorithm", NAMES)
def test_with_one_update_a_step_no_clip_binds_and_the_weight_carries_all_of_the_ratio(algorithm: Algorithm) -> None:
    record = random_record(spread=0.6)
    loose = Bounds("truncated", 1e9)
    loss, gradient = normalised(record, config_of(algorithm, loose, ratio="proximal", clip_low=0.01, clip_high=0.01))
    unclipped = config_of(algorithm, loose, clip_low=0.999, clip_high=1e9)
    if algorithm == "cispo":  # its clip is the bound of the weight
        unclipped = config_of(algorithm, loose, clip_low=0.01, clip_high=0.01)
    expected, slopes = normalised(record, unclipped)
    assert loss == pytest.approx(expected)
    assert torch.allclose(gradient, slopes, rtol=1e-12, atol=0)
    explicit = replace(record, proximal=record.trainer.detach())
    assert torch.equal(normalised(explicit, config_of(algorithm, loose, ratio="proximal"))[1], gradient) == (
        algorithm != "cispo"
    )


@pytest.mark.parametrize("algorithm", NAMES)
def test_at_staleness_zero_the_forms_differ_by_rounding_alone(algorithm: Algorithm) -> None:
    rule = ALGORITHMS[algorithm]
    bounds = Bounds(rule.correction, 2.0)
    record = random_record(spread=1e-6)
    slopes = [normalised(record, config_of(algorithm, bounds, ratio=ratio))[1] for ratio in ("proximal", "behaviour")]
    assert torch.allclose(*slopes, rtol=1e-12, atol=0)


def test_rounding_of_bf16_makes_gspo_drop_sequences_in_the_behaviour_form_alone() -> None:
    """A gap of 2e-3 between sampler and trainer is seven times gspo's clip."""
    record = record_of([(1.0, [1.002] * 4), (-1.0, [0.998] * 4)])
    bounds = Bounds("truncated", 2.0)
    behaviour, proximal = (config_of("gspo", bounds, ratio=ratio) for ratio in ("behaviour", "proximal"))
    assert not normalised(record, behaviour)[1].any()
    assert normalised(record, proximal)[1].tolist() == pytest.approx([-1.002 / 8] * 4 + [0.998 / 8] * 4)
    fractions = [policy_loss(record, config)[1].metrics()["clip_fraction"] for config in (behaviour, proximal)]
    assert fractions == [1.0, 0.0]


# trajectories of several segments -----------------------------------------------------------------------------------


def cut(record: TokenRecord) -> TokenRecord:
    """The same trajectories, of which every second token is in another segment."""
    return replace(record, sequences=2 * record.sequences + torch.arange(len(record.sequences)) % 2)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("algorithm", [name for name in NAMES if name != "gspo"])
def test_an_episode_weighs_the_same_in_however_many_segments_it_comes(algorithm: Algorithm, ratio: Ratio) -> None:
    record = random_record(spread=0.5)
    config = config_of(algorithm, Bounds("truncated", 1.5), ratio=ratio)
    (loss, gradient), (expected, slopes) = normalised(cut(record), config), normalised(record, config)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(gradient, slopes, rtol=1e-12, atol=0)
    assert policy_loss(cut(record), config)[1].metrics()["sequences"] == 9


def test_gspo_takes_a_ratio_for_each_segment_and_weighs_it_by_its_share_of_the_trajectory() -> None:
    whole = record_of([(1.0, [0.5, 0.5, 0.25, 1.0, 1.0]), (1.0, [1.0])])  # one trajectory of 5 tokens, one of 1
    record = replace(whole, sequences=torch.tensor([0, 0, 1, 1, 1, 2]))
    loss, gradient = normalised(record, config_of("gspo"))
    second = 0.25 ** (1 / 3)
    assert loss == pytest.approx(-(2 / 5 * 0.5 + 3 / 5 * second + 1.0) / 2)
    assert gradient.tolist() == pytest.approx([-0.5 / 10] * 2 + [-second / 10] * 3 + [-1 / 2])


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_token_of_zero_advantage_teaches_nothing(algorithm: Algorithm) -> None:
    record = record_of([(0.0, [1.5, 0.5]), (1.0, [1.0])])
    assert normalised(record, config_of(algorithm))[1].tolist()[:2] == [0.0, 0.0]


def test_on_policy_algorithms_that_differ_by_their_clip_alone_are_the_same() -> None:
    record = random_record(spread=0.0)
    slopes = {name: normalised(record, config_of(name))[1] for name in NAMES}
    assert torch.allclose(slopes["grpo"], slopes["gspo"])
    assert torch.allclose(slopes["dapo"], slopes["cispo"])
    assert torch.allclose(slopes["dr-grpo"] * 256, slopes["rloo"])
    assert not torch.allclose(slopes["grpo"], slopes["dapo"])


def test_rare_tokens_rise_further_with_dapo_than_with_grpo_and_cispo_never_lets_go() -> None:
    record = record_of([(1.0, [1.25])])
    assert normalised(record, config_of("grpo"))[1].item() == 0.0
    assert normalised(record, config_of("dapo"))[1].item() == pytest.approx(-1.25)
    far = record_of([(1.0, [20.0]), (-1.0, [20.0])])
    assert normalised(far, config_of("cispo"))[1].tolist() == pytest.approx([-2.5, 2.5])
    assert policy_loss(far, config_of("cispo"))[1].metrics()["clip_fraction"] == 1.0


def test_long_wrong_replies_are_punished_per_token_as_short_ones_unless_grpo_divides_by_length() -> None:
    record = record_of([(-1.0, [1.0]), (-1.0, [1.0] * 9)])
    for name, favour in (("grpo", 9), ("dr-grpo", 1), ("dapo", 1), ("rloo", 1)):
        slopes = normalised(record, config_of(name))[1]  # type: ignore[arg-type]
        assert (slopes[0] / slopes[1]).item() == pytest.approx(favour), name


def test_gspo_moves_the_tokens_of_a_sequence_alike() -> None:
    record = record_of([(1.0, [4.0, 0.2, 1.1])])
    slopes = normalised(record, config_of("gspo"))[1]
    assert slopes.tolist() == pytest.approx([-((4.0 * 0.2 * 1.1) ** (1 / 3)) / 3] * 3)


def test_the_policy_gradient_is_that_of_the_exact_return_in_expectation() -> None:
    draw = torch.Generator().manual_seed(6)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    behaviour = torch.log_softmax(torch.randn(6, generator=draw, dtype=torch.float64), 0)
    values = torch.randn(6, generator=draw, dtype=torch.float64)
    policy = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad(-(policy.exp() * values).sum(), logits, retain_graph=True)[0]
    estimate = torch.zeros_like(exact)
    for token in range(6):  # every reply once, weighed by how often the behaviour policy gives it
        record = record_of([(values[token].item(), [1.0])])
        one = replace(record, trainer=policy[token : token + 1], behaviour=behaviour[token : token + 1])
        loss = policy_loss(one, config_of("rloo"))[0]
        estimate += behaviour[token].exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(estimate, exact, rtol=1e-12, atol=1e-14)


# the table ----------------------------------------------------------------------------------------------------------


def test_the_kinds_the_table_and_the_page_name_the_same_algorithms_and_corrections() -> None:
    assert tuple(ALGORITHMS) == NAMES == get_args(TrainingSpec.model_fields["algorithm"].annotation)
    literal = get_args(CorrectionSpec.model_fields["type"].annotation)[0]
    assert get_args(Correction) == get_args(literal)
    assert get_args(Ratio) == get_args(TrainingSpec.model_fields["ratio"].annotation)


def test_bounds_that_a_job_does_not_give_are_those_of_the_papers() -> None:
    same = dict.fromkeys(["grpo", "dr-grpo", "reinforce++"], (0.2, 0.2))
    clips = {**same, "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
    assert {name: rule.clip for name, rule in ALGORITHMS.items() if rule.surrogate != "weighted"} == clips


def test_only_what_strict_mode_refuses_compares_across_the_step() -> None:
    spanning = [name for name, rule in ALGORITHMS.items() if rule.over == "step"]
    assert spanning == ["reinforce++"]
    for name in NAMES:
        body = {"steps": 1, "algorithm": name}
        assert TrainingSpec.model_validate({**body, "maxStaleness": 1}).algorithm == name
        if name in spanning:
            with pytest.raises(ValueError, match="allows no statistic over several groups"):
                TrainingSpec.model_validate({**body, "maxStaleness": 0})
        else:
            assert TrainingSpec.model_validate({**body, "maxStaleness": 0}).max_staleness == 0


def test_truncation_closes_the_side_that_the_clip_leaves_open() -> None:
    record = record_of([(-1.0, [6.0]), (1.0, [6.0]), (-1.0, [1.5])])
    free = normalised(record, config_of("grpo"))[1]
    bounded = normalised(record, config_of("grpo", Bounds("truncated", cap=2.0)))[1]
    assert free.tolist() == pytest.approx([2.0, 0.0, 0.5])
    assert bounded.tolist() == pytest.approx([2 / 3, 0.0, 0.5])
    assert math.isfinite(bounded.sum().item())
