"""The public errors: one class per row of the error table, classed by what the caller should do.

A message is one sentence that is safe to show: the fact, then the way out. It never carries a value that the
caller sent, a token, a path of the host or a traceback. Adapters have private exceptions of their own; the
engine and the service turn them into these with `raise … from`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

Detail = str | int | float | bool | None | list["Detail"] | dict[str, "Detail"]


class MicrovmError(Exception):
    """Base of all public errors. `retryable`: the same call may succeed later without any change."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, details: Mapping[str, Detail] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = dict(details or {})

    def body(self) -> dict[str, Detail]:
        """The value of the `error` key in every door's answer."""
        out: dict[str, Detail] = {"code": self.code, "message": self.message, "retryable": self.retryable}
        if self.details:
            out["details"] = self.details
        return out


class InvalidArguments(MicrovmError):
    """A wrong, missing or unknown argument; `details.fields` names each field and its problem."""

    code, http_status, exit_status = "invalid_arguments", 400, 2

    @classmethod
    def field(cls, field: str, problem: str) -> InvalidArguments:
        return cls(
            f"Invalid arguments: {field}: {problem}",
            details={"fields": [{"field": field, "problem": problem}]},
        )


class Unauthenticated(MicrovmError):
    code, http_status, exit_status = "unauthenticated", 401, 3


class PermissionDenied(MicrovmError):
    code, http_status, exit_status = "permission_denied", 403, 4


class NotFound(MicrovmError):
    """Unknown, or somebody else's: the two are the same answer."""

    code, http_status, exit_status = "not_found", 404, 5


class Busy(MicrovmError):
    """Another operation, or active jobs, are in the way; the message says which."""

    code, http_status, exit_status, retryable = "busy", 409, 6, True


class Conflict(MicrovmError):
    """A request id reused with other arguments, an offset or a name already taken."""

    code, http_status, exit_status = "conflict", 409, 6


class FailedPrecondition(MicrovmError):
    """The state does not allow it; the message says which state would."""

    code, http_status, exit_status = "failed_precondition", 409, 7


class OutcomeUnknown(MicrovmError):
    """An earlier attempt may have taken effect. Final for its request id."""

    code, http_status, exit_status = "outcome_unknown", 409, 8


class TooLarge(MicrovmError):
    code, http_status, exit_status = "too_large", 413, 2


class HeadersTooLarge(TooLarge):
    http_status = 431


class HostNotAllowed(MicrovmError):
    code, http_status, exit_status = "host_not_allowed", 421, 2


class OriginNotAllowed(MicrovmError):
    code, http_status, exit_status = "origin_not_allowed", 403, 2


class MethodNotAllowed(MicrovmError):
    code, http_status, exit_status = "method_not_allowed", 405, 2


class UnsupportedMediaType(MicrovmError):
    code, http_status, exit_status = "unsupported_media_type", 415, 2


class SlowRequest(MicrovmError):
    code, http_status, exit_status, retryable = "slow_request", 408, 2, True


class RateLimited(MicrovmError):
    """`retry_after_s`: whole seconds until one call fits again."""

    code, http_status, exit_status, retryable = "rate_limited", 429, 9, True

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, details={"retry_after_s": retry_after_s})
        self.retry_after_s = retry_after_s


class ResourceExhausted(MicrovmError):
    """Quota, host limit or real space; `details` has the numbers."""

    code, http_status, exit_status = "resource_exhausted", 507, 10


class Unavailable(MicrovmError):
    """Certainly not executed; the same call may succeed later."""

    code, http_status, exit_status, retryable = "unavailable", 503, 11, True


class Internal(MicrovmError):
    """Our fault; what happened is in the service's log only."""

    code, http_status, exit_status = "internal", 500, 1

    def __init__(self, message: str = "Internal error; the operator finds the cause in the service log.") -> None:
        super().__init__(message)


PUBLIC_ERRORS: tuple[type[MicrovmError], ...] = (
    InvalidArguments,
    Unauthenticated,
    PermissionDenied,
    NotFound,
    Busy,
    Conflict,
    FailedPrecondition,
    OutcomeUnknown,
    TooLarge,
    HostNotAllowed,
    OriginNotAllowed,
    MethodNotAllowed,
    UnsupportedMediaType,
    SlowRequest,
    RateLimited,
    Internal,
    Unavailable,
    ResourceExhausted,
)
"""One per row of the contract's table, for docs, `openapi.json` and the command line's exit statuses."""

EXIT_STATUS_BY_CODE: dict[str, int] = {error.code: error.exit_status for error in PUBLIC_ERRORS}
