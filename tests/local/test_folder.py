import errno
import fcntl
import os
import time

import pytest

from marlaas.local.changes import is_running
from marlaas.local.folder import RunRecord, hold, replace_folder, translated, write
from marlaas_api.errors import InvalidInput


def test_a_new_folder_has_no_record_and_keeps_what_is_written(tmp_path, document):
    with hold(tmp_path / "a" / "b") as folder:
        assert folder.read_record() == RunRecord()
        folder.write_record(RunRecord(jobs=(document(),)))
    with hold(tmp_path / "a" / "b") as folder:
        assert folder.read_record().jobs == (document(),)


def test_two_runs_never_share_a_folder_which_is_free_again_when_its_run_has_ended(tmp_path):
    in_use = rf"in use by another `marlaas run` \(process {os.getpid()}\)"
    with hold(tmp_path), pytest.raises(InvalidInput, match=in_use), hold(tmp_path):
        pass
    with hold(tmp_path):
        pass


def test_a_command_that_asks_whether_a_run_uses_the_folder_does_not_keep_a_run_from_it(tmp_path, monkeypatch):
    with hold(tmp_path) as folder:
        pass
    with (folder.state / "lock").open("a") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: asking.close())
        with hold(tmp_path):
            assert asking.closed
            assert is_running(folder)


@pytest.mark.parametrize(
    ("place", "words"),
    [("out", "a file exists where a folder is needed"), ("/proc/nowhere/out", "cannot be written")],
)
def test_a_place_where_no_folder_can_be_made_is_told(tmp_path, place, words):
    (tmp_path / "out").write_text("")
    with pytest.raises(InvalidInput, match=words), hold(tmp_path / place):
        pass


def test_an_error_inside_the_run_is_not_blamed_on_the_folder(tmp_path):
    with pytest.raises(OSError, match="of something else"), hold(tmp_path):
        raise OSError("of something else")


def test_a_full_disk_says_what_to_do(tmp_path):
    sentence = "the disk is full: free space and run the same command again"
    with pytest.raises(InvalidInput, match=sentence), translated(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    target = tmp_path / "summary.json"
    write(target, b"old")
    (tmp_path / ".summary.json.partial").mkdir()
    with pytest.raises(InvalidInput):
        write(target, b"new")
    assert target.read_bytes() == b"old"


def test_a_strange_record_is_told_rather_than_overwritten(tmp_path):
    with hold(tmp_path) as folder:
        (folder.state / "run.json").write_text('{"jobs": 3}')
        with pytest.raises(InvalidInput, match="is not a record of this version of marlaas"):
            folder.read_record()


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for name, text in (("adapter", "old"), ("made", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / text).write_text(text)
    replace_folder(tmp_path / "made", tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "new").read_text() == "new"


def test_a_jobs_folder_shows_the_logs_of_all_roles_that_serve_it(tmp_path, document):
    with hold(tmp_path) as folder:
        (folder.logs / "orchestrator.log").write_text("hello")
        for _ in range(2):
            folder.link_logs(document().ref)
        assert (tmp_path / "team-a" / "reverse" / "logs" / "orchestrator.log").read_text() == "hello"


def test_a_file_system_without_symbolic_links_serves_too(tmp_path, document, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refused)
    with hold(tmp_path) as folder:
        (folder.logs / "orchestrator.log").touch()
        folder.link_logs(document().ref)
