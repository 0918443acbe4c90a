import pytest

from marlaas_api.names import JobRef, eval_group, group_token, is_attempt, train_group

JOB = JobRef("team-a", "sums", "0c1d-t7")


def test_a_groups_token_is_its_name_without_the_uid() -> None:
    assert group_token(train_group(JOB, 12)) == "t12"
    assert group_token(eval_group(JOB, 3, 5)) == "e3v5"


@pytest.mark.parametrize(
    "group", ["", "t3", "-t3", "u-t", "u-t-3", "u-x3", "u-t3v5", "u-e3", "u-t3\n", "u-t\u0663", "u-t" + "9" * 5000]
)
def test_what_nobody_here_names_a_group_is_none(group: str) -> None:
    with pytest.raises(ValueError, match="not a group name") as error:
        group_token(group)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("attempt", ["1", "007", "123456789"])
def test_an_attempt_is_the_groups_name_the_member_and_up_to_nine_digits(attempt: str) -> None:
    assert is_attempt(f"u-t3-0-{attempt}", "u-t3", 0)


@pytest.mark.parametrize(
    "episode",
    ["u-t3-0-", "u-t3-0-1234567890", "u-t3-0-x", "u-t3-0-²", "u-t3-0-1\n", "u-t3-1-1", "u-t4-0-1", "v-t3-0-1", "1", ""],
)
def test_other_names_are_no_attempt(episode: str) -> None:
    assert not is_attempt(episode, "u-t3", 0)
