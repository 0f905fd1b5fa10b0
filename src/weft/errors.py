"""Every error weft raises on purpose, in one tree.

    WeftError
    ├── RequestError     the caller can mend it: InvalidRequest(param) · ContextTooLong
    ├── ModelError       the model can not be served: ModelNotFound · BadModel · UnsupportedModel
    └── InternalError    "this can not happen": an invariant broke

A message is one sentence that names the thing, the value, the limit, and what to do.
"""

from __future__ import annotations


class WeftError(Exception):
    """The root: whatever weft raises on purpose."""


class RequestError(WeftError):
    """The caller can mend it; costs only this request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A parameter has a value that can not be honoured."""


class ContextTooLong(RequestError):
    """Prompt and answer do not fit into the model's context."""


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
