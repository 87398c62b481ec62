"""Exceptions of the client. `errors` adds a subclass of ApiError for each code."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

if TYPE_CHECKING:
    from contextcache.client.types import Reply


class ClientError(Exception):
    """Base of every exception of this client. Pickling keeps all fields."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Restore the fields without a call of `__init__`, whose arguments are other ones."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # not in typeshed


class ConnectionFailed(ClientError):
    """No answer came in time, after all retries. The server may have run the request.

    Sending a create or a turn again under the same idempotency key is safe: it runs once.
    """


class NotUnderstood(ClientError):
    """The answer is not of this API or over 64 MiB: another program answers at the URL, or a far newer release."""


class BrokenStream(ClientError):
    """A streamed answer ended early. Its turn is not committed, unless only the end of the stream was lost.

    Before you repeat the turn, read the context's generation, or repeat it under the same idempotency key.
    """

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text
        """The text that had arrived."""


class NotCreated(ClientError):
    """The server answered a create but stored no context. `reply.usage.context.reason` has the reason.

    After `store_unavailable`, the context may still exist under `reply.session_id`.
    """

    def __init__(self, message: str, *, reply: Reply) -> None:
        super().__init__(message)
        self.reply = reply
        """The whole answer."""


class ApiError(ClientError):
    """The server answered with an error."""

    code: ClassVar[str] = ""
    """Code of the class. `said_code` is the code of the answer, which this release may not know."""
    by_code: ClassVar[dict[str, type[ApiError]]] = {}

    @override
    def __init_subclass__(cls) -> None:
        """Register the class under its code. A subclass of yours does not replace the class of its code."""
        super().__init_subclass__()
        cls.by_code.setdefault(cls.code, cls)

    def __init__(
        self, message: str, *, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """`headers`: those of the answer, names in lower case."""
        super().__init__(message)
        headers = headers or {}
        error = error_of(body)
        self.message = message
        self.status = status
        self.body = body
        """The whole JSON body; empty if the body is not JSON."""
        self.said_code = str(error.get("code") or "")
        self.param: str | None = error.get("param")
        """Field of the request at fault."""
        self.request_id = headers.get("x-request-id", "")
        """Id of the request in the server's logs."""
        self.retry_after_s = _seconds(headers.get("retry-after"))
        """Seconds to wait before a retry; None if the answer has no `Retry-After`."""


def api_error(status: int, body: object, headers: Mapping[str, str], *, way: str = "") -> ApiError:
    """Return the error for an answer with a bad status, whatever its body is.

    `way`: the proxy on the way to the server, for the message of an answer that the server may not have sent.
    """
    parsed: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    error = error_of(parsed)
    cls = ApiError.by_code.get(str(error.get("code")), ApiError)
    message = str(error.get("message") or f"the server answered with HTTP status {status}{way}")
    return cls(message, status=status, body=parsed, headers=headers)


def error_of(body: object) -> Mapping[str, Any]:
    """Return the object `error` of a body; empty if the body has none."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return error if isinstance(error, Mapping) else {}


def _seconds(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return max(0.0, float(text)) if text is not None else None
    return None  # a date, which the gateway never sends
