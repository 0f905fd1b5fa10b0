"""Errors that weft raises on purpose, in one tree. A message is one sentence: the thing, the value, the limit, what to do."""


class WeftError(Exception):
    """The root: whatever weft raises on purpose."""


class RequestError(WeftError):
    """The caller can mend the request, and only this request fails (4xx)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A parameter has a value that can not be honoured."""


class UnsupportedParameter(InvalidRequest):
    """A parameter is known but not done here; it is refused, never ignored."""


class TemplateFailed(InvalidRequest):
    """The model's chat template refuses these messages; the message has its words."""


class GrammarRejected(InvalidRequest):
    """A schema, regex or grammar can not be enforced; the message says what of it."""


class ContextTooLong(RequestError):
    """Prompt and answer do not fit into the model's context."""

    def __init__(self, message: str, param: str | None = None, *, limit: int = 0, got: int = 0) -> None:
        super().__init__(message, param)
        self.limit = limit
        self.got = got


class InsufficientMemory(RequestError):
    """The request could not run on this machine even if it were alone."""


class UnknownModel(RequestError):
    """No model of this name is served; the message lists those that are."""


class ModelConflict(RequestError):
    """A model can not be loaded beside what is there now."""


class RequestCancelled(RequestError):
    """Somebody ended the request before its answer was complete."""


class RequestTimedOut(RequestError):
    """The request did not have its end in the time it was given."""


class BusyError(WeftError):
    """Nothing is wrong with the request; it may come again after `retry_after` seconds (429, 503)."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(BusyError):
    """As many requests wait as may."""


class EngineStarting(BusyError):
    """The model is being loaded."""


class ServerStopping(BusyError):
    """The server is being stopped."""


class EngineError(WeftError):
    """The engine could not finish a request; not the caller's fault (500)."""


class RowFailed(EngineError):
    """The request's row failed; the other rows went on."""


class EngineDied(EngineError):
    """The engine's process ended while the request was in it."""


class ModelError(WeftError):
    """A model can not be brought up; nothing is served."""


class ModelNotFound(ModelError):
    """No alias, folder, cache entry or hub id answers to this name."""


class BadModel(ModelError):
    """A file of the model is missing or damaged; the message names it."""


class UnsupportedModel(ModelError):
    """The model's architecture or one of its layers can not be held exactly."""


class InternalError(WeftError):
    """An invariant of ours broke. Please report it with the message."""
