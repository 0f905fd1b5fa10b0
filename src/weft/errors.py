"""Exceptions that more than one room needs. A message names the thing, its value, the limit, and what to do."""


class WeftError(Exception):
    """Base class of the errors that weft reports to users; wrong Python arguments may raise ValueError instead."""


class RequestError(WeftError):
    """Base class of errors that end one request only; answered with a 4xx status, except for a timeout (504)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A request parameter has a value that is invalid or can not be honoured."""


class UnsupportedParameter(InvalidRequest):
    """A request uses a known parameter or kind of content that is not supported here; it is refused, never ignored."""


class TemplateFailed(InvalidRequest):
    """The model's chat template raises an error for the messages, or leaves one of them out of the prompt."""


class TemplateTooCostly(InvalidRequest):
    """The model's chat template takes more time or memory, or writes more text, than is allowed."""


class GrammarRejected(InvalidRequest):
    """The engine can not compile or enforce a JSON schema, regex or other grammar; the error text says why."""


class ImageProblem(InvalidRequest):
    """An image of the request can not be used: its bytes, format or size are refused, or it can not be decoded."""


class ContextTooLong(RequestError):
    """The prompt and the requested answer together are longer than the model's context."""

    def __init__(self, message: str, param: str | None = None, *, limit: int = 0, got: int = 0) -> None:
        super().__init__(message, param)
        self.limit = limit
        self.got = got


class InsufficientMemory(RequestError):
    """The request's prompt and answer would not fit into the engine's memory even if it ran alone."""


class UnknownModel(RequestError):
    """The model named by a request is not served here, or can not be found when it is to be loaded."""


class ModelConflict(RequestError):
    """A model can not be loaded now: it does not fit in free memory, or a model of that name is still being unloaded."""


class RequestCancelled(RequestError):
    """The request was cancelled, or its model unloaded, before its answer was complete."""


class RequestTimedOut(RequestError):
    """The request was not finished within its time limit, set by the client or by the server's request_timeout."""


class BusyError(WeftError):
    """Base class of temporary refusals (429, 503): the request is valid and may be sent again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(BusyError):
    """A request is refused because too many answers run or wait, or too many requests wait for a model to be loaded."""


class RateLimited(BusyError):
    """A request is refused because its tenant has used up its requests or tokens of a minute; `headers` say what is left."""

    def __init__(self, message: str, retry_after: int = 1, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, retry_after)
        self.headers = headers or {}


class EngineStarting(BusyError):
    """The requested model is not ready yet: it is being loaded, or its engine does not respond at the moment."""


class ServerStopping(BusyError):
    """The server is shutting down, so the request is refused or ended before its answer is complete."""


class EngineError(WeftError):
    """The engine could not finish a request, through no fault of the caller (500)."""


class RowFailed(EngineError):
    """The engine ended this sequence because computing it failed (model, grammar, states); the other rows were not affected."""


class EngineRefused(WeftError):
    """An engine at a given address is there, and can not be used: another key, protocol or model."""


class EngineDied(EngineError):
    """The engine process that a request needs has ended or can not be started, so the request fails."""


class ModelError(WeftError):
    """Base class of errors because of which a model can not be loaded and served."""


class ModelNotFound(ModelError):
    """A model's name matches no alias, folder or cached model, or the model could not be downloaded."""


class BadModel(ModelError):
    """A file of the model is missing, damaged or inconsistent; the error text names the file or folder."""


class UnsupportedModel(ModelError):
    """The model's architecture, file format or one of its layers is not supported, or can not be batched exactly."""


class InternalError(WeftError):
    """An invariant of weft itself was violated: a bug, to be reported with the error text."""
