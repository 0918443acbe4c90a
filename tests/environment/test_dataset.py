"""Data sets: rows of every kind of file, the division into tasks, rewards, refused rows, and what `data show` says."""

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bench import hub_server
from bench.s3_server import serving
from math_verify import parse, verify
from tests.environment.playing import chat_completions, play
from tests.tables import data, rows
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.environment import Play, Score, ServiceFailed, Split, Task
from marlaas.envs import own_modules, suite_args
from marlaas.envs.dataset import index, math_check, report
from marlaas.envs.dataset.arrow_rows import BATCH
from marlaas.envs.dataset.environment import Dataset
from marlaas.envs.dataset.files import digest
from marlaas.envs.dataset.settings import Source
from marlaas.envs.dataset.sources import files_of
from marlaas.envs.demonstrations import demonstration_of
from marlaas.envs.loading import load, resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.blobs_store import ForeignBucket
from marlaas_api.errors import InvalidInput
from marlaas_api.names import digest_of, split_of

ARGS = data(__file__, "data_set")
FILES = data(__file__, "data_files")
HUB = {"hub": "acme/rows", "split": "train"}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8")
    Path("packed.jsonl.gz").write_bytes(gzip.compress(FILES["sums.jsonl"].encode()))


def made(**args):
    return Dataset(**{**ARGS, **args})


@pytest.mark.parametrize(("args", "places"), rows(__file__, "data_places"))
def test_rows_of_every_kind_of_source_are_tasks_with_their_place(args, places):
    for _ in ("the index is built", "and read from the cache"):
        parts = [made(**args).tasks.part(split) for split in Split]
        tasks = [part.task(at) for part in parts for at in range(len(part))]
        found = [[one.place.rpartition("/")[2], one.rendered.prompt[0].content, one.rendered.truth] for one in tasks]
        assert sorted(found) == places


def test_relative_names_are_looked_up_in_the_jobs_volumes_first(tmp_path, monkeypatch):
    (tmp_path / "data/rows").mkdir(parents=True)
    Path("data/rows/more.jsonl").write_text(FILES["sums.jsonl"], "utf-8")
    monkeypatch.setenv("MARLAAS_DATA", str(tmp_path / "data"))
    for pattern in ("rows/*.jsonl", "sums.jsonl"):
        assert sum(len(made(source={"files": pattern}).tasks.part(split)) for split in Split) == 4


@pytest.mark.parametrize("context", [index.in_processes, contextlib.nullcontext], ids=["in processes", "in one"])
def test_a_large_file_is_divided_by_the_prompt_and_every_row_is_found(monkeypatch, context):
    monkeypatch.setattr(index, "_LEAST_PARTED", 1)
    monkeypatch.setattr(index.os, "sched_getaffinity", lambda _: {0, 1})
    many = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(2 * BATCH + 5)]
    pq.write_table(pa.Table.from_pylist(many), "many.parquet", row_group_size=BATCH - 1)
    args = {**ARGS, "source": {"files": "many.parquet"}, "held_out": None}
    with context():
        made = Dataset(**args)
    parts = {split: made.tasks.part(split) for split in Split}
    assert sorted(number for part in parts.values() for number in part.numbers) == list(range(len(many)))
    for split, part in parts.items():
        for at in (0, len(part) // 2, len(part) - 1):
            drawn = (task := Task(split, at + len(part), 0)).drawn
            assert play("dataset", args, lambda _, at=at: str(part.numbers[at] + 1), task)[0].rewards == {"policy": 1.0}  # noqa: B023
            assert [split_of(text) for text in drawn] == [split]
    pq.write_table(pa.Table.from_pylist([*many, {"question": " ", "answer": "#### 0"}]), "many.parquet")
    with context(), pytest.raises(InvalidInput, match=f"many.parquet:row {len(many) + 1}: the prompt is empty"):
        Dataset(**args)


def test_a_data_set_of_a_suite_is_held_out_as_a_whole_and_cannot_be_trained():
    undivided = {name: value for name, value in ARGS.items() if name != "held_out"}
    tasks = Dataset(**suite_args("dataset", undivided)).tasks
    assert len({tasks.held_out.task(at).place for at in range(len(tasks.held_out))}) == 4
    with pytest.raises(InvalidInput, match="all rows are held out"):
        tasks.train.task(0)
    assert suite_args("dataset", ARGS) == ARGS, "what the user says of held-out rows holds"


@pytest.mark.parametrize(("args", "reason"), rows(__file__, "data_refused"))
def test_bad_arguments_and_rows_are_refused_with_their_place(args, reason):
    with pytest.raises(InvalidInput, match=reason):
        made(**args)


@pytest.fixture
def bucket(monkeypatch):
    with serving() as bucket:
        for name, value in bucket.variables.items():
            monkeypatch.setenv(name, value)
        for key, name in {"a.jsonl": "sums.jsonl", "b/held.csv": "held.csv", "notes.txt": "odd.txt"}.items():
            bucket.objects[f"s3/{key}"] = FILES[name].encode()
        yield bucket


def test_objects_are_downloaded_once_for_each_content_and_need_no_credentials_then(bucket, monkeypatch):
    def digests():
        tasks = made(source={"s3": "s3://bucket/s3/*.jsonl"}, held_out={"s3": "s3://bucket/s3/**/h?ld.csv"}).tasks
        assert tasks.held_out.task(1).place == "s3://bucket/s3/b/held.csv:3"
        return [one.sha256 for one in tasks.files()]

    found = digests()
    assert [digests(), bucket.asked["GET"]] == [found, 10], "two objects, and four lists of two pages"
    bucket.objects["s3/a.jsonl"] += b"\n"
    changed = digests()
    assert [changed[0] != found[0], changed[1]] == [True, found[1]]
    bucket.refusal = (500, "Down")
    (known,) = files_of(Source(s3=("s3://bucket/s3/*.jsonl",)), is_known=True)
    assert (known.origin, digest(known)) == ("s3://bucket/s3/a.jsonl", changed[0]), "for the record of a run"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert digests() == changed, "as the sandboxes of `marlaas run`"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://another.store")
    with pytest.raises(InvalidInput, match="there are no credentials for s3://bucket"):
        digests()


def test_an_object_that_is_replaced_while_it_is_read_is_not_kept_under_its_old_version(bucket, tmp_path):
    store = ForeignBucket("s3://bucket")
    listed = store.head("s3/a.jsonl")
    bucket.objects["s3/a.jsonl"] += b"\n"
    with pytest.raises(InvalidInput, match=r"s3://bucket/s3/a.jsonl was replaced while it was read; begin again"):
        store.copy(listed, tmp_path / "copy")


@pytest.mark.parametrize(("key", "answer", "kind", "reason"), rows(__file__, "data_stores"))
def test_a_store_that_refuses_or_is_away_is_told_in_a_sentence(key, answer, kind, reason, bucket, monkeypatch):
    bucket.refusal = answer if answer is None else tuple(answer)
    if answer == []:
        monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    assert refusal({"s3": f"s3://bucket/{key}"}, reason) == kind


def refusal(source, reason):
    with pytest.raises(InvalidInput, match=reason) as caught:
        made(source=source, held_out={"share": 1})
    return type(caught.value).__name__


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with hub_server.serving() as hub:
        for name, value in hub.constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield hub
        assert not [one for one in hub.asked if one.endswith("test-0.jsonl")], "of another split"


def test_a_split_of_the_hub_is_downloaded_whole_once_and_leaves_no_connection(hub):
    hub.failures["train-0.jsonl"] = [500] * 100
    assert refusal(HUB, "the hub answers 500; connect") == "SourceSilent"
    hub.failures.clear()
    args = {**ARGS, "source": HUB, "held_out": {"share": 1}}
    assert f"to {hub.url[7:]}" not in str(load("dataset", args, ["policy"])[1])
    num_asked = len(hub.asked)
    assert (len(Dataset(**args).tasks.held_out), len(hub.asked)) == (2, num_asked), "nothing is asked again"


@pytest.mark.parametrize(("changed", "token", "kind", "reason"), rows(__file__, "data_hubs"))
def test_a_hub_that_refuses_is_told_in_a_sentence(changed, token, kind, reason, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token or hub_server.TOKEN)
    assert refusal({**HUB, **changed}, reason) == kind


@pytest.mark.parametrize(("args", "turns"), rows(__file__, "data_demonstrations"))
def test_rows_demonstrate_a_completion_or_every_reply_of_a_conversation_and_bad_rows_are_named(args, turns):
    def demonstrated():
        environment = resolve("dataset", {**ARGS, **args}).create()
        return demonstration_of(environment, Task(Split.TRAIN, 0, 0), ["policy"])["policy"]

    if isinstance(turns, str):
        with pytest.raises(InvalidInput, match=turns):
            demonstrated()
    else:
        assert [[[one.content for one in before], reply.content] for before, reply in demonstrated()] == turns


@pytest.mark.parametrize(("rewards", "reply", "reward", "answer"), rows(__file__, "data_rewards"))
def test_rewards_are_weighted_sums_and_no_number_is_a_fault_that_names_the_row(rewards, reply, reward, answer):
    args = {**ARGS, "rewards": rewards, "source": {"files": "one.jsonl"}, "held_out": {"files": "held.csv"}}
    if isinstance(reward, str):
        with pytest.raises(InvalidInput, match=reward):
            play("dataset", args, lambda _: reply)
    else:
        outcome = play("dataset", args, lambda _: reply)[0]
        assert outcome.rewards["policy"] == pytest.approx(reward)
        assert outcome.answer == ("" if answer is None else digest_of(answer))


@pytest.mark.parametrize(("rewards", "right", "expected"), rows(__file__, "data_compared"))
def test_replies_of_a_group_are_compared(rewards, right, expected):
    found, task = made(rewards=rewards), Task(Split.TRAIN, 0, 0)
    lengths = {name: {"text": name, "num_tokens": number} for name, number in (("a", 10), ("b", 20), ("c", 30))}
    assert own_modules("dataset", {"rewards": rewards}) == ["rewards_of_rows"] * ("group" in str(rewards))
    plays = [Play({"policy": 0.0}, {"math": float(one["num_tokens"] in right)}, one) for one in lengths.values()]
    if isinstance(expected, str):
        with pytest.raises(InvalidInput, match=expected):
            found.score_group(task, plays)
    else:
        assert [score.reward["policy"] for score in found.score_group(task, plays)] == expected


def judged(replies, **judge):
    """The reward of the reply `x`; the judge, an agent or a service, gives these replies."""
    prompt = "{{ question }} {{ truth }} {{ reply }}: 0 to 10?"
    args = {**ARGS, "rewards": [{"judge": {"prompt": prompt, "scale": [0, 10], "pause_s": 0, **judge}}]}
    args |= {"source": {"files": "one.jsonl"}, "held_out": {"files": "held.csv"}}
    left = iter(replies)
    channel = RecordedReplies(lambda asked: next(left) if asked.agent == "judge" else "x", 9)
    agents = ["policy", "judge"] if "agent" in judge else ["policy"]
    return play_episode(resolve("dataset", args).create(), Task(Split.TRAIN, 0, 0), EpisodeState(agents, channel))


@pytest.mark.parametrize(("replies", "expected"), rows(__file__, "data_judged"))
def test_a_judge_of_the_job_gives_a_number_or_fails(replies, expected):
    if isinstance(expected, str):
        with pytest.raises(ServiceFailed, match=expected):
            judged(replies, agent="judge")
    else:
        assert judged(replies, agent="judge").metrics["judge"] == expected


def test_a_judge_without_its_key_is_the_environments_fault_and_the_only_other_agent_plays():
    with pytest.raises(InvalidInput, match="the environment has no variable NO_KEY"):
        judged([], url="http://127.0.0.1:1", model="m", key="NO_KEY")
    judge = {"prompt": "x", "agent": "judge"}
    code = resolve("dataset", {**ARGS, "rewards": [{"judge": judge}]})
    code.check_agents(["judge", "policy"])
    for names in (["policy"], ["a", "b", "judge"]):
        with pytest.raises(InvalidInput, match="judge"):
            code.check_agents(names)
    with pytest.raises(InvalidInput, match="'dataset' takes one agent, but the job has a, b"):
        resolve("dataset", ARGS).check_agents(["a", "b"])


@pytest.mark.parametrize(("answers", "expected"), rows(__file__, "data_services"))
def test_a_judges_service_is_asked_again_unless_it_refuses_and_once_for_a_prompt(
    answers, expected, monkeypatch, tmp_path
):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with chat_completions(answers) as (url, asked):
        judge = {"url": url, "model": "m", "key": "JUDGE_KEY"}
        if isinstance(expected, str):
            with pytest.raises(ServiceFailed, match=expected):
                judged([], **judge)
        else:
            for tokens in (12.0, 0.0):
                metrics = judged([], **judge).metrics
                assert (metrics["judge"], metrics["judge_tokens"]) == (expected, tokens)
    assert [one["messages"][0]["content"] for one in asked] == [r"What is 3/4? \frac{3}{4} x: 0 to 10?"] * len(answers)
    assert {one["key"] for one in asked} == {"Bearer sesame"}


@pytest.mark.parametrize(("truth", "reply"), rows(__file__, "data_answers"))
def test_answers_are_compared_as_math_verify_does(truth, reply):
    assert math_check.is_equal(truth, reply) == verify(parse(math_check.marked(truth)), parse(reply))


def test_a_comparison_that_hangs_is_stopped_and_one_that_crashes_is_no_reward(monkeypatch):
    monkeypatch.setattr(math_check, "CPU_S", 1)
    monkeypatch.setattr(math_check, "compare", lambda *_: 9**9**9)
    assert math_check.is_equal("1", "1") is None
    monkeypatch.setattr(math_check, "compare", lambda *_: os.kill(os.getpid(), 9))
    with pytest.raises(math_check.MathCheckFailed, match="exit code -9"):
        math_check.is_equal("1", "1")


def test_data_show_prints_tasks_and_warns(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    shown = CliRunner().invoke(build(["data"]), ["data", "show", f"{tmp_path}/job.yaml", "-n", "1", "--json"])
    (job,) = json.loads(shown.stdout)["jobs"].values()
    (task,) = job["tasks"]
    found = [job["splits"]["train"]["rows"], job["dropped"], task["tokens"], task["rewardOfTruth"], task["truth"]]
    assert [*found, [*job["warnings"], *task["warnings"]]] == data(__file__, "data_shown")


@pytest.mark.parametrize(("others", "num"), [({}, 1), ({"format": 0.0}, 4)])
def test_a_truth_is_written_in_further_ways_only_while_another_might_earn_more(others, num, monkeypatch):
    data_set, asked = made(), []
    score = Score(1.0, metrics={"math": 1.0, "math_timeout": 0.0, **others})
    monkeypatch.setattr(data_set.rewards, "score", lambda reply, _: asked.append(reply.text) or score)
    (shown,) = report.shown(data_set, Split.TRAIN, 1, None)
    assert (len(asked), shown.of_truth) == (1 + num, score), "and the empty reply"
