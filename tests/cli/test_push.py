"""`marlaas push` and uploads of a run: which adapter is uploaded, and what its model card says."""

import json
from dataclasses import replace

import pytest
import yaml
from bench import hub_server, s3_server
from huggingface_hub import constants
from tests.cli.conftest import invoke
from tests.cli.test_tools import leave
from tests.harness import a_progress, a_step, identity, job_document

from marlaas.local.pushing import Uploader, require_targets
from marlaas.local.records import open_job
from marlaas_api import failpoints
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import EvalRecord

ARGS = {"source": {"hub": "acme/rows"}, "prompt": "a | b"}
SPEC = {"environment": {"name": "dataset", "args": ARGS}, "training": {"algorithm": "grpo", "steps": 2}}
JOBS = [job_document(name, uid=name, namespace="a", spec=SPEC) for name in ("one", "none")]


def adapter(folder, base="acme/base"):
    folder.mkdir(parents=True)
    config = {"base_model_name_or_path": base, "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def out(tmp_path):
    """Job `one` has two steps, three evaluations, a curve and the adapter of its second version, the best; job `none` has none."""
    done = {"versions": {"policy": 3}, "promoted": {"policy": 2}}
    progress = a_progress(JOBS[0], **done)
    folder = leave(tmp_path / "out", progress, jobs=JOBS).job(JOBS[0].ref)
    adapter(folder / "adapter")
    (folder / "curve.png").write_bytes(b"curve")
    (folder / "steps.jsonl").write_text("".join(f"{a_step(JOBS[0], n).model_dump_json()}\n" for n in range(2)))
    body = {"at": 1.0, "num_episodes": 8, "metrics": {"exact": 0.5}}
    evals = [EvalRecord(**identity(JOBS[0]), **body, step=n, version=n, reward_mean=0.25 + n / 4) for n in (0, 2, 3)]
    (folder / "evals.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in evals))
    return tmp_path / "out"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    with hub_server.serving() as hub:
        for name, value in hub.constants.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def test_a_runs_adapter_is_uploaded_with_curve_and_card(out, hub):
    result = invoke("push", str(out), "acme/lora", "--job", "one")
    assert (result.exit_code, result.stdout) == (0, f"{hub.url}/acme/lora\n")
    is_private, files = hub.models["acme/lora"]
    assert is_private
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors", "curve.png", "README.md"}
    head, _, text = files["README.md"].decode().removeprefix("---\n").partition("---\n")
    known = yaml.safe_load(head)
    assert (known["base_model"], known["tags"]) == ("acme/base", ["lora", "marlaas", "grpo"])
    assert (known["library_name"], known["datasets"]) == ("peft", ["acme/rows"])
    for line in ("| reward | 0.25 → 0.75 |", "| exact | 0.50 → 0.50 |", "![Reward by step](curve.png)", "# a/one"):
        assert f"{line}\n" in text
    assert 'from_pretrained("acme/lora")' in text
    assert '"a \\| b"' in text, "a bar does not end a cell"


def test_a_folder_of_an_adapter_keeps_a_card_of_its_own_and_what_is_missing_is_said(out, tmp_path):
    folder = adapter(tmp_path / "fetched", base="/models/tiny")
    card = invoke("push", str(folder), "acme/lora", "--card").stdout
    assert "# lora\n" in card
    assert "base_model" not in card, "a folder of this machine is no base model of others"
    (folder / "README.md").write_text("mine")
    assert invoke("push", str(folder), "acme/lora", "--card").stdout == "mine\n"
    for options, words in (
        ((), "choose one with --job a/one or --job a/none"),
        (("--job", "none"), "a/none has no adapter in"),
        (("--job", "one", "--agent", "critic"), "no adapter of agent critic; agents with an adapter: policy"),
    ):
        error = invoke("push", str(out), "acme/lora", *options).exception
        assert isinstance(error, InvalidInput)
        assert words in str(error)


def test_a_manifests_adapters_are_uploaded_once_each_and_a_failure_says_how_to_repeat_it(
    out, hub, tmp_path, monkeypatch
):
    agents = [{"name": "policy"}, {"name": "critic"}, {"name": "judge", "trainable": False}]
    spec = {**SPEC, "agents": agents, "export": {"hub": {"repo": "acme/sums", "private": False}}}
    document, notes = job_document("one", uid="one", namespace="a", spec=spec), list[str]()
    found = open_job(out, "one")
    folder = found.folder / "adapter"
    adapter(folder / "critic")
    adapter(folder / "policy")
    ended = a_progress(document, phase="Succeeded", step=2, versions={"policy": 3, "critic": 2}, promoted={"policy": 2})
    uploader = Uploader(tmp_path / "pushed", notes.append)
    assert uploader.push(replace(found, document=document, progress=a_progress(document, versions={"policy": 3})))
    assert not hub.models, "the job goes on"
    hub.failures["commit"] = [403]
    assert not uploader.push(replace(found, document=document, progress=ended))
    again = Uploader(tmp_path / "pushed", notes.append)
    assert again.push(replace(found, document=document, progress=ended))
    assert {name: is_private for name, (is_private, _) in hub.models.items()} == {
        "acme/sums-policy": False,
        "acme/sums-critic": False,
    }
    assert sum("/commit/" in one for one in hub.asked) == 3, "one refused, and one for each agent"
    failed, *told = notes
    assert failed.endswith(f"then upload it with: marlaas push {found.folder} acme/sums-policy --agent policy --public")
    assert told == [
        f"a/one: version {version} of agent {name} is at {hub.url}/acme/sums-{name}"
        for name, version in (("critic", 2), ("policy", 2))
    ]
    require_targets(document)
    folders = job_document(spec={**spec, "export": {"s3": {"url": "s3://b/sums"}}}).spec.uploads
    assert folders == {"s3": {"policy": "s3://b/sums/policy", "critic": "s3://b/sums/critic"}}
    taken = {**spec, "export": {"hub": {"repo": "acme/sums.git"}}, "agents": agents[:1]}
    with pytest.raises(InvalidInput, match=r"acme/sums.git is no name that the hub takes"):
        require_targets(job_document("one", spec=taken))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InvalidInput, match=r"job a/one: spec\.export\.hub: set HF_TOKEN"):
        require_targets(document)


def test_a_bucket_and_a_folder_get_a_version_once_with_its_marker(out, tmp_path, monkeypatch):
    export = {"s3": {"url": "s3://bucket/sums"}, "volume": {"claimName": "adapters", "path": "sums"}}
    document, notes = job_document("one", uid="one", namespace="a", spec={**SPEC, "export": export}), list[str]()
    ended = a_progress(document, phase="Succeeded", versions={"policy": 3}, promoted={"policy": 2})
    found = replace(open_job(out, "one"), document=document, progress=ended)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"spec\.export\.s3: there are no credentials for the bucket: set AWS_ACC"):
        require_targets(document)
    with s3_server.serving() as bucket:
        for name, value in bucket.variables.items():
            monkeypatch.setenv(name, value)
        bucket.refusal, bucket.refused = (403, "AccessDenied"), ("PUT",)
        for marks, has_all in (("this run", False), ("this run", True), ("another run", True)):
            assert Uploader(tmp_path / marks, notes.append).push(found) == has_all
            bucket.refusal = None
        assert bucket.asked["PUT"] == 1 + 5, "one refused, and each file once"
        other = lambda _: bucket.objects.update({"sums/adapter_config.json": b"of another job"})  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hook", other)
            bucket.objects.pop("sums/marlaas.json")
            assert not Uploader(tmp_path / "disturbed", notes.append).push(found)
        assert "somebody else writes to s3://bucket/sums" in notes[-2]
        assert "sums/marlaas.json" not in bucket.objects
        for source, *target in ((out, "s3://bucket/sums", "--job", "one"), (found.adapter_of("policy"), "./mine")):
            assert invoke("push", str(source), *target).exit_code == 0
    written = {one.name: one.read_bytes() for one in (tmp_path / "sums").iterdir()}
    assert bucket.objects == {f"sums/{name}": content for name, content in written.items()}
    assert b'"agent": "policy",\n  "version": 2,' in written["marlaas.json"]
    assert b'from_pretrained("sums")' in written["README.md"]
    assert b'from_pretrained("mine")' in (tmp_path / "mine" / "README.md").read_bytes()
    assert "spec.export.s3: the store of s3://bucket/sums answers 403 Forbidden (AccessDenied)" in notes[0]
    assert notes[0].endswith(f"upload it with: marlaas push {found.folder} s3://bucket/sums --agent policy")
    for foreign in ("sums/checkpoint-500", "sums/optimizer.pt"):
        (tmp_path / foreign).mkdir()
        with pytest.raises(InvalidInput, match=r"spec\.export\.volume: .*/sums holds files other than an adapter"):
            require_targets(document)
        (tmp_path / foreign).rmdir()
    (tmp_path / "sums").rename(tmp_path / "moved")
    (tmp_path / "sums").symlink_to("moved")
    with pytest.raises(InvalidInput, match=r"spec\.export\.volume: .*/sums is a symbolic link"):
        require_targets(document)
