"""The error vocabulary of the whole system: everything that fails is either Retryable or Permanent."""


class MarlaasError(Exception):
    """Base of every error that MARLaaS raises on purpose; its text is meant for the person who has to act."""


class Retryable(MarlaasError):
    """The same call may succeed later (a server restarting, a queue full)."""


class Permanent(MarlaasError):
    """The same call will never succeed; somebody must change something first."""


class InvalidInput(Permanent):
    """What a person wrote (manifest, flag, argument) cannot be taken; the text says where and what was expected."""


class UnsupportedSchema(Permanent):
    """A message was written by a newer MARLaaS than this worker."""


def first_cause(error: BaseException) -> BaseException:
    """What an error is about: of a task group's, the first one in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
