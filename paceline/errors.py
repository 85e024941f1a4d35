"""What a user can do wrong, each with what was wrong, what was expected and what to do.

Every error that reaches a user derives from PacelineError and its message names the remedy.
`assert` is kept for invariants of our own code.
"""


class PacelineError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(PacelineError):
    """An option is unknown, has the wrong type, or is out of range."""


class HeadMismatchError(ConfigError):
    """A draft head was made for another target."""


class ModelError(PacelineError):
    """A model cannot be found, fetched or read."""


class CheckpointError(ModelError):
    """A model file is truncated, corrupt, or of a kind that is not supported."""


class UnsupportedModelError(ModelError):
    """The file is sound, but its architecture or tensor format is not one we run."""


class RequestError(PacelineError):
    """A request cannot be served as asked: bad parameters, bad ids, too long."""


class BackendError(PacelineError):
    """A backend is not available on this machine or failed during a pass."""


class BackendLostError(BackendError):
    """A backend can run no more passes, as a part of it is gone: the engine ends."""


class GrammarError(BackendError):
    """The grammar of a running request needs more than its limits allow."""


class ExhaustedError(BackendError):
    """The options of a running request leave no token to sample."""


class OverloadedError(PacelineError):
    """The queue is full: the request may be sent again later."""


class UnavailableError(PacelineError):
    """The engine is stopping, or has died: it takes no requests."""
