from pathlib import Path

import pytest

from marlaas_e2e.worker_image import NoRoom, require_room


def test_a_disk_without_room_for_the_worker_image_is_told_before_the_build(tmp_path: Path) -> None:
    require_room(tmp_path / "cache", 0.0)
    with pytest.raises(NoRoom, match=r"takes 1000000000 GB of disk .*make room, or set MARLAAS_CACHE"):
        require_room(tmp_path / "cache", 1e9)
