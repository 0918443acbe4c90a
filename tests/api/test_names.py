import pytest
from tests.tables import rows

from marlaas_api import names

JOB = names.JobRef("team-a", "sums", "0c1d-t7")


def test_a_groups_token_is_its_name_without_the_uid():
    assert names.group_token(names.train_group(JOB, 12)) == "t12"
    assert names.group_token(names.eval_group(JOB, 3, 5)) == "e3v5"


@pytest.mark.parametrize("group", [*rows(__file__, "no_groups"), "u-t" + "9" * 5000])
def test_what_nobody_here_names_a_group_is_none(group):
    with pytest.raises(ValueError, match="not a group name") as error:
        names.group_token(group)
    assert len(str(error.value)) < 300


def test_an_attempt_is_the_groups_name_the_member_and_up_to_nine_digits():
    for number in ("1", "007", "123456789"):
        assert names.is_attempt(f"u-t3-0-{number}", "u-t3", 0)
    for number in ("", "1234567890123", "x", "²", "1\n"):
        assert not names.is_attempt(f"u-t3-0-{number}", "u-t3", 0)
    for other in ("u-t3-1-1", "u-t4-0-1", "v-t3-0-1", "1", ""):
        assert not names.is_attempt(other, "u-t3", 0)


@pytest.mark.parametrize(
    ("num_agents", "position", "group", "member", "own", "turn", "seed"), rows(__file__, "turn_seeds")
)
def test_the_seeds_of_turns_never_change(num_agents, position, group, member, own, turn, seed):
    """A job gives the same results in a later release. The first agent of a team has the seeds of a job with one agent."""
    assert names.turn_number(own, position, num_agents) == turn
    assert names.sampling_seed(7, num_agents, f"uid-{group}", member, turn) == seed
    assert names.derive_seed(7, names.Split.TRAIN.value, 12) == 4818405458173397534, "of a task"
