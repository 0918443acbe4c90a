"""`python-tool` in the sandbox role, as a job plays it: real child processes, a bus in memory, a script as the policy."""

import os

import pytest
from tests.sandbox.conftest import SandboxHarness

from marlaas_api.messages import Ending

SUPERVISOR = os.getpid()  # the sandbox's supervisor runs in this process
ATTACKS = [
    "import socket; socket.create_connection(('127.0.0.1', 4222))",
    "import os\nwhile True: os.fork()",
    "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "open('/tmp/from-a-policy', 'w')",
    f"print(open('/proc/{SUPERVISOR}/environ', 'rb').read())",
    f"open('/proc/{SUPERVISOR}/mem', 'rb')",
    "import os; print(open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "import os; os.kill(os.getppid(), 9)",
    f"import os; os.kill({SUPERVISOR}, 9)",
    "while True: print('x' * 1000)",
    "import time; time.sleep(10**6)",
]
ENDS = ("PermissionError", "MemoryError", "[stopped: it printed", "[stopped: it took longer")


@pytest.mark.processes
async def test_every_attack_is_the_policys_doing_and_harms_no_episode(tmp_path) -> None:
    harness, heard = SandboxHarness(tmp_path), {}

    def answer(request):
        """Every member of the group attacks in its own way, and then gives up."""
        if request.turn > 0:
            heard[request.member] = request.append[-1].content
        attack = f"```python\n{ATTACKS[request.member]}\n```"
        return [harness.rollout.result(request, "I give up." if request.turn else attack)]

    harness.rollout.answer = answer
    document = harness.document("python-tool", args={"cpu_s": 1, "memory_mib": 128}, concurrency=4)
    episodes = await harness.play_document(document, len(ATTACKS))
    scored = (None, "", Ending.COMPLETED, {"policy": 0.0})
    assert [(e.fault, e.fault_text, e.ending, e.rewards) for e in episodes] == [scored] * len(ATTACKS)
    assert {e.metrics["programs_failed"] for e in episodes} == {1.0}
    last_lines = [heard[member].splitlines()[-1] for member in range(len(ATTACKS))]
    assert all(line.startswith(ENDS) for line in last_lines), last_lines
    assert "from-a-policy" not in os.listdir("/tmp")  # noqa: PTH208
