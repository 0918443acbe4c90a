from marlaas_api.last_words import START_MARK, last_words

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


def test_a_role_that_says_why_it_ends_is_quoted():
    assert last_words(OURS) == "adapter rank 64 is above 16"


def test_an_engines_own_error_wins_over_the_one_that_only_says_that_it_failed():
    assert last_words(ENGINE) == "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])"


def test_only_the_last_life_counts():
    log = f"{START_MARK} rollout-0\n{OURS}{START_MARK} rollout-0\nModuleNotFoundError: No module named 'vllm'\n"
    assert last_words(log) == "ModuleNotFoundError: No module named 'vllm'"


def test_a_process_that_left_no_error_is_told_by_its_last_lines():
    assert last_words(f"{START_MARK} x\none\ntwo\nthree\nfour\n") == "two / three / four"


def test_a_process_that_left_nothing_is_told_too():
    assert last_words(f"{START_MARK} x\n") == "it left nothing in its log"


def test_a_dotted_exception_is_told_by_its_own_name():
    assert last_words("torch.cuda.OutOfMemoryError: CUDA out of memory") == "OutOfMemoryError: CUDA out of memory"
