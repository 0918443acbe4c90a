"""The time limit of a tool call, in the main thread and in others."""

import threading
import time

import pytest

from marlaas.time_limit import time_limit

LONG_S, SHORT_S = 60.0, 0.05


def work_forever():
    while True:
        pass


def in_a_thread(code):
    """Run code in a thread; return its exception."""
    found: list[BaseException] = []

    def run():
        try:
            code()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def here(code):
    try:
        code()
    except BaseException as error:
        return error
    return None


@pytest.fixture(params=[here, in_a_thread])
def run(request):
    return request.param


def limited(*limits_s: float, code=work_forever):
    """Code within limits, the outermost first."""

    def call():
        if not limits_s:
            return code()
        with time_limit(limits_s[0]):
            return limited(*limits_s[1:], code=code)()

    return call


@pytest.mark.parametrize("limits_s", [(SHORT_S,), (LONG_S, SHORT_S), (SHORT_S, LONG_S)])
def test_the_shortest_limit_ends_the_code(run, limits_s):
    error = run(limited(*limits_s))
    assert type(error).__name__ == "TimeoutError"
    assert str(error) == f"the tool took longer than {SHORT_S:g} s"


def test_a_call_that_waits_is_too_long_although_it_returns(run):
    assert isinstance(run(limited(SHORT_S, code=lambda: time.sleep(4 * SHORT_S))), TimeoutError)


def test_code_within_its_limit_returns_and_is_not_interrupted_later(run):
    def code():
        with time_limit(SHORT_S), time_limit(None):
            pass
        for _ in range(100):
            time.sleep(SHORT_S / 50)

    assert run(code) is None


def test_an_error_of_the_code_and_one_that_it_handles_stay_its_own(run):
    assert isinstance(run(limited(LONG_S, code=lambda: {}["x"])), KeyError)

    def handles():
        with time_limit(SHORT_S):
            try:
                work_forever()
            except TimeoutError:
                return

    assert run(handles) is None


def test_a_limit_goes_on_after_one_within_it(run):
    def code():
        with time_limit(2 * SHORT_S):
            with time_limit(LONG_S):
                pass
            work_forever()

    assert str(run(code)) == f"the tool took longer than {2 * SHORT_S:g} s"
