import asyncio
import os
from functools import partial

from marlaas_worker.sandbox.children import Children
from marlaas_worker.sandbox.seclusion import clean_variables
from marlaas_worker.sandbox.server import Child
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server


async def test_whoever_is_cancelled_again_while_a_child_dies_leaves_none_of_its_pipes_open(tmp_path):
    config = ChildrenConfig("reverse", {}, 1 << 29, 30.0, tmp_path, clean_variables(os.environ))
    children = Children(partial(start_server, config))
    forked: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def play() -> None:
        async with children.child() as child:
            forked.set_result(child)
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    child = await forked
    playing.cancel()
    await asyncio.sleep(0)
    playing.cancel()
    await asyncio.wait({playing})
    assert child.writer.is_closing()
    await child.ended
    await children.close()
