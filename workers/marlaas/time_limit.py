"""A time limit for a tool call: by a signal in the main thread, by an asynchronous exception in any other thread."""

import contextlib
import signal
import time
from _thread import allocate_lock, get_ident  # without `threading`, a fork copies a hundred pages less
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the calling thread after `seconds`. None sets no limit. Limits may be nested.

    Outside of the main thread, a call into C, such as `time.sleep`, is not interrupted: the error is raised when it returns.

    Raises:
        TimeoutError: the time is over.
    """
    if seconds is None:
        yield
        return
    text = f"the tool took longer than {seconds:g} s"

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(text)

    try:
        before = signal.signal(signal.SIGALRM, ring)
    except ValueError:  # not the main thread
        with _ThreadLimit(seconds, text):
            yield
        return
    try:
        with _timer(seconds, before):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _timer(seconds: float, outer_handler: "Callable[[int, FrameType | None], object] | int | None") -> Iterator[None]:
    """Send SIGALRM after `seconds`. The timer of a limit around this one goes on; if it ends first, it rings for that limit."""
    outer_s, began = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    if 0 < outer_s <= seconds:
        signal.signal(signal.SIGALRM, outer_handler)
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left_s = max(1e-6, outer_s - (time.monotonic() - began)) if outer_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, left_s)


class _ThreadLimit:
    """Raises TimeoutError in the thread that entered it, by CPython's `PyThreadState_SetAsyncExc`.

    An error that was not raised before the block ends, because the block waited in C, is raised at its end.
    """

    def __init__(self, seconds: float, text: str) -> None:
        self._seconds, self._text = seconds, text
        self._thread = get_ident()
        self._lock = allocate_lock()
        self._is_over = self._is_up = self._is_raised = False

    def __enter__(self) -> None:
        from threading import Timer

        self._timer = Timer(self._seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._is_over = True
            self._timer.cancel()
            if self._is_up and not self._is_raised:
                _raise_in(self._thread, None)
        if self._is_up and not self._is_raised and error is None:
            raise TimeoutError(self._text)

    def _ring(self) -> None:
        limit = self

        class TimeUp(TimeoutError):
            """CPython creates it without arguments, in the thread where it is raised."""

            def __init__(self) -> None:
                super().__init__(limit._text)
                limit._is_raised = True

        TimeUp.__name__ = TimeoutError.__name__
        with self._lock:
            if not self._is_over:
                self._is_up = True
                _raise_in(self._thread, TimeUp)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction; None takes back one that was not raised yet."""
    import ctypes

    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
