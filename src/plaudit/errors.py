"""The errors a user can cause. Everything here is printed as one or two lines, without a traceback, exit status 2."""


class PlauditError(Exception):
    """A user's mistake or an outside failure: what is wrong, where, and what to do about it."""


class ConfigError(PlauditError):
    """A configuration that cannot be: unknown key, value out of range, impossible combination."""


class DataError(PlauditError):
    """A file that is missing, empty or malformed; the message names file, row and what was expected."""


class ModelError(PlauditError):
    """A model folder that lacks something: weights, a reward head, a chat template."""


class EndpointError(ModelError):
    """A model behind an address: it cannot be reached, refuses, or gives what is no answer."""


class RunError(PlauditError):
    """A run folder that cannot be written, is in use already, or cannot be resumed."""


class NonFinite(PlauditError):
    """A loss, gradient or probability that is not a number; nothing was stepped."""


class Interrupted(PlauditError):
    """Ctrl-C: what is done is saved; the message says how to go on."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message, or its class where there is none: what fits into a message of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]
