"""Every error a user of mooncake_serve can meet, as one tree.

MooncakeError                     retry: may the same call succeed later?
├── ConfigError                   a setting is wrong; names the field and the fix
│   └── StoreConfigMismatch       a running store was started with another value
├── ModelError                    the model cannot be served
│   ├── ModelNotFound             nothing under that name or path, or offline and not cached
│   └── UnsupportedModel          an architecture whose KV cache we cannot represent
├── StoreError                    the store failed; inside the engine it becomes a cache miss
│   ├── StoreUnavailable          no store answers on the socket
│   ├── StoreTimeout              the store did not answer before the deadline
│   ├── StoreRefused              the store is up and said no (limit, cap, bad argument)
│   └── StoreProtocolError        the two sides speak different versions, or a frame is malformed
├── RequestError                  one request cannot be answered; carries the HTTP status
│   ├── InvalidRequest            400: a field is wrong
│   │   └── ContextTooLong        400: prompt and max_tokens exceed the context
│   ├── Unauthorized              401
│   ├── Forbidden                 403: operators' port, asked from where it must not be
│   ├── NotFound                  404: model or route
│   ├── PayloadTooLarge           413
│   ├── Overloaded                429: with Retry-After
│   │   └── RateLimited           429: this tenant's own limit
│   ├── Unavailable               503: no replica can take it now
│   ├── DeadlineExceeded          504
│   └── EngineFailed              500: the replica could not finish it
├── BatchError                    a batch of jobs cannot start: a file, a job or an option is wrong
└── APIError                      the SDK's view of a failed call
    ├── APIConnectionError        the server could not be reached
    ├── APITimeoutError           no answer in time
    └── APIStatusError            the server answered with an error status; of these:
        ├── APIInvalidRequest     400, 413, 422: the request, unchanged, will never do
        ├── APIUnauthorized       401: no key, or an unknown one
        ├── APIForbidden          403
        ├── APINotFound           404: model, file, batch or route
        ├── APIOverloaded         429: queues are full, or this key's limit is reached
        └── APIServerError        500 and above
            ├── APIUnavailable    503: no replica can take it now
            └── APIDeadlineExceeded  504: not done before the server's deadline
"""

from __future__ import annotations

from typing import Any


class MooncakeError(Exception):
    """Base of the tree. `retry` says whether the same call may succeed later, unchanged."""

    retry: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross Ray's processes whole, whatever their constructors take."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[MooncakeError], args: tuple[Any, ...], state: dict[str, Any]
) -> MooncakeError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(MooncakeError):
    """A setting is wrong. `field` is its dotted path, as written in the configuration."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class StoreConfigMismatch(ConfigError):
    """A store already runs on this node with another value of `field`."""

    def __init__(self, field: str, have: object, want: object) -> None:
        super().__init__(
            field,
            f"the running store has {have}, this configuration wants {want}; "
            "apply the new value with `mooncake-serve store restart`, or restore the old one",
        )
        self.have = have
        self.want = want


class ModelError(MooncakeError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """Nothing is found under that name or path."""


class UnsupportedModel(ModelError):
    """The model's attention keeps state that paged KV blocks cannot represent."""


class StoreError(MooncakeError):
    """The store failed. The engine turns each of these into a cache miss."""


class StoreUnavailable(StoreError):
    """No store answers on the socket."""

    retry = True


class StoreTimeout(StoreError):
    """The store did not answer before the deadline."""

    retry = True


class StoreRefused(StoreError):
    """The store is up and said no: a limit, the cap, or a wrong argument."""


class StoreProtocolError(StoreError):
    """Both sides speak different wire versions, or a frame was malformed."""


class RequestError(MooncakeError):
    """One request cannot be answered. Rendered as OpenAI's error envelope."""

    status: int = 500
    type: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def envelope(self) -> dict[str, Any]:
        """The body OpenAI clients expect: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(RequestError):
    """A field of the request is wrong; `param` names it."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt plus max_tokens, does not fit the model's context."""


class Unauthorized(RequestError):
    """No key, or an unknown one."""

    status = 401
    type = "authentication_error"


class Forbidden(RequestError):
    """Not to be asked from there, whoever asks."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """No such model or route."""

    status = 404
    type = "not_found_error"


class PayloadTooLarge(RequestError):
    """The body is larger than `api.max_body`."""

    status = 413
    type = "invalid_request_error"


class Overloaded(RequestError):
    """Too much work is queued; try again after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    retry = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """One tenant asks for more than it may."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = "rate_limit_exceeded"


class Unavailable(RequestError):
    """No replica can take the request now."""

    status = 503
    type = "service_unavailable_error"
    retry = True


class DeadlineExceeded(RequestError):
    """The request did not finish before its deadline."""

    status = 504
    type = "timeout_error"
    retry = True


class EngineFailed(RequestError):
    """The replica could not finish the request."""

    retry = True


class BatchError(MooncakeError):
    """A batch of jobs cannot start: names the file, the line or the option."""


class APIError(MooncakeError):
    """Base of what the SDK raises for a failed call."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class APIConnectionError(APIError):
    """The server could not be reached."""

    retry = True


class APITimeoutError(APIConnectionError):
    """No answer came in time."""


class APIStatusError(APIError):
    """The server answered with an error status."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status}: {message}", request_id=request_id)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.response: Any = None
        """The HTTP response, where the error is not an event of a stream."""
        self.retry = status in (429, 503)

    @staticmethod
    def kind(status: int) -> type[APIStatusError]:
        """The class for a status."""
        return _KINDS.get(status, APIServerError if status >= 500 else APIStatusError)


class APIInvalidRequest(APIStatusError):
    """A field of the request is wrong, or it is too large; `param` names it."""


class APIUnauthorized(APIStatusError):
    """No key, or an unknown one."""


class APIForbidden(APIStatusError):
    """Not to be asked from there, whoever asks."""


class APINotFound(APIStatusError):
    """No such model, file, batch or route."""


class APIOverloaded(APIStatusError):
    """Too much work is queued, or the key's limit is reached; see `retry_after_s`."""


class APIServerError(APIStatusError):
    """The server could not answer."""


class APIUnavailable(APIServerError):
    """No replica can take the request now."""


class APIDeadlineExceeded(APIServerError):
    """The request did not finish before the server's deadline."""


_KINDS: dict[int, type[APIStatusError]] = {
    400: APIInvalidRequest,
    401: APIUnauthorized,
    403: APIForbidden,
    404: APINotFound,
    413: APIInvalidRequest,
    422: APIInvalidRequest,
    429: APIOverloaded,
    503: APIUnavailable,
    504: APIDeadlineExceeded,
}
