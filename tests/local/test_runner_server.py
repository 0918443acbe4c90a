"""A run's message server: who connects to it as whom, and a server that is there already."""

import contextlib
import os
import re
import time
from pathlib import Path

from tests.local.runs import Place

from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats

SEED = re.compile(r"\bS[AOU][A-Z2-7]{50,}")


def contents(folder: Path) -> list[str]:
    """All files as text, while their writers are at work: a temporary file or folder that is gone again is left out."""
    said = []
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    said.append(path.read_bytes().decode(errors="replace"))
    return said


def test_every_role_connects_as_itself_and_no_secret_lies_where_others_look(place: Place) -> None:
    place.script(pause_at=1)
    run = place.start()
    run.until(type="progress", step=1)
    said = [" ".join([*process.cmdline(), *process.environ().values()]) for process in run.processes()]
    said += contents(place.folder)
    place.go()
    assert run.end() == 0
    users = {
        path.stem.rpartition(".")[0] if path.stem.startswith("sandbox") else path.stem
        for path in place.folder.glob("*.connected")
    }
    assert users == {"orchestrator", "rollout.tiny", "trainer.tiny", "sandbox.team-a.reverse"}
    assert not [text for text in said if SEED.search(text)]


async def test_a_server_with_users_of_its_own_takes_the_persons_credentials(place: Place, tmp_path: Path) -> None:
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        refused = place.start(server.url)
        assert refused.end() == 2
        assert "rejects marlaas run" in str(refused.told[-1]["message"])
        creds = tmp_path / "runner.creds"
        creds.write_text(mint(keys, OrchestratorUser(), time.time()))
        assert place.start(server.url, str(creds)).end() == 0


async def test_a_server_that_is_there_already_is_used_and_left_running(place: Place, tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path / "nats") as server:
        run = place.start(server.url)
        assert run.end() == 0
        assert server.pid is not None
        place.out = tmp_path / "other"
        other = place.start(server.url)
        assert other.end() == 2
        assert "already has a job team-a/reverse of another run" in str(other.told[-1]["message"])
