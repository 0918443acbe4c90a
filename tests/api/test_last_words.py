import pytest

from marlaas_api.last_words import START_MARK, last_line, last_words, visible

OURS = """\
2026-11-21T09:55:14.123Z INFO rollout-0 marlaas_worker: rollout starts, process 7
2026-11-21T09:55:15.123Z CRITICAL rollout-0 marlaas_worker: adapter rank 64 is above 16
    Traceback (most recent call last):
      File "x.py", line 3, in f
    marlaas_api.errors.InvalidInput: adapter rank 64 is above 16
"""

ENGINE = """\
2026-11-21T09:55:14.123Z INFO rollout-0 marlaas_worker: rollout starts, process 7
(EngineCore pid=812) ERROR 11-21 09:55:40 [core.py:1136] EngineCore failed to start.
(EngineCore pid=812) ERROR 11-21 09:55:40 [core.py:1136] Traceback (most recent call last):
(EngineCore pid=812) ERROR 11-21 09:55:40 [core.py:1136]   File "core.py", line 1110, in run_engine_core
(EngineCore pid=812) ERROR 11-21 09:55:40 [core.py:1136] ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])
(EngineCore pid=812) Process EngineCore:
2026-11-21T09:55:41.123Z CRITICAL rollout-0 marlaas_worker: RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
    Traceback (most recent call last):
    RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (OURS, "adapter rank 64 is above 16"),
        (ENGINE, "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])"),
        (
            f"{START_MARK} x\n{OURS}{START_MARK} x\nModuleNotFoundError: No module named 'vllm'\n",
            "ModuleNotFoundError: No module named 'vllm'",
        ),
        (f"{START_MARK} x\none\ntwo\nthree\nfour\n", "two / three / four"),
        (f"{START_MARK} x\n", "it left nothing in its log"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", "OutOfMemoryError: CUDA out of memory"),
    ],
    ids=["a role", "an engine's own error wins", "only the last life counts", "no error", "nothing", "a dotted name"],
)
def test_the_error_that_ended_a_process_is_told_in_its_own_words(log, words):
    assert last_words(log) == words


def test_the_last_line_is_told_without_its_time_and_source():
    assert last_line(f"{START_MARK} x\n2026-11-21T09:55:14.123Z INFO rollout-0 marlaas_worker: loading\n") == "loading"
    assert last_line(f"{ENGINE}{START_MARK} x\n") == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 漢字 😀\n\tand lines", "plain, ünïcode 漢字 😀\n\tand lines"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31mred", r"\x9b31mred"),
        ("over\rwritten\x08\x00", r"over\x0dwritten\x08\x00"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
    ],
)
def test_what_a_terminal_would_act_on_is_written_out(text, shown):
    assert visible(text) == shown
    assert visible(shown) == shown
