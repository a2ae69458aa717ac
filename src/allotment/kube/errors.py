# SPDX-License-Identifier: Apache-2.0
"""Errors of the API server, each with the next step.

    KubeError                 1   the API server refused, or its answer is invalid
    ├── UnreachableError          no answer: refused, timed out, untrusted certificate
    ├── DeniedError               401 and 403: unknown client, or missing rights
    ├── ObjectMissingError        404
    ├── ConflictError             409
    └── GoneError                 410: the requested version is too old; list again

The number is the exit code.
"""

import os
import ssl
from collections.abc import Iterator

import aiohttp
import msgspec

from allotment.model.errors import AllotError
from allotment.model.structs import prepared

_UNAUTHORIZED = 401
_FORBIDDEN = 403
_NOT_FOUND = 404
_CONFLICT = 409
_GONE = 410
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_MANIFESTS = "deploy/manifests/agent.yaml and scheduler.yaml grant"


class KubeError(AllotError):
    """The API server did not do what was requested.

    `status` is the HTTP status, None without an answer. `retry_after_s`: the server's Retry-After.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """The same request may succeed later."""
        return (
            self.status is None or self.status == _TOO_MANY_REQUESTS or self.status >= _SERVER_ERROR
        )


class UnreachableError(KubeError):
    """There was no answer."""


class DeniedError(KubeError):
    """The API server does not accept the client's credentials or rights."""


class ObjectMissingError(KubeError):
    """There is no such object."""


class ConflictError(KubeError):
    """Another client changed or created the object meanwhile."""


class GoneError(KubeError):
    """The API server has dropped that version: list again."""


_CLASSES: dict[int, type[KubeError]] = {
    _UNAUTHORIZED: DeniedError,
    _FORBIDDEN: DeniedError,
    _NOT_FOUND: ObjectMissingError,
    _CONFLICT: ConflictError,
    _GONE: GoneError,
}


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: int | None = None


class _Status(msgspec.Struct, rename="camel"):
    """The API server's description of a failure (`kind: Status`)."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None


def explain_refusal(
    body: bytes, *, asked: str, status: int | None = None, retry_after: str | None = None
) -> KubeError:
    """Return the error for an answer.

    `asked` names the request: `list pods`. `status` None: the one in `body`, a Status object (in a
    watch). `retry_after`: that header.
    """
    try:
        answer = msgspec.json.decode(body, type=prepared(_Status))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # For example a proxy's page: only the status is known.
        answer = _Status()
    code = status or answer.code or _SERVER_ERROR
    seconds = answer.details.retry_after_seconds if answer.details else None
    if retry_after and retry_after.isdecimal():
        seconds = int(retry_after)
    why = answer.message or answer.reason or f"HTTP status {code}"
    return _CLASSES.get(code, KubeError)(
        f"the API server refused to {asked}: {why}",
        hint=_hint(code, asked),
        status=code,
        retry_after_s=seconds,
    )


def explain_failure(
    error: aiohttp.ClientError | OSError, *, asked: str, server: str
) -> UnreachableError:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return UnreachableError(
                f"cannot {asked}: the certificate of the API server at {server} is not"
                f" trusted: {getattr(cause, 'verify_message', cause)}",
                hint="use the certificate authority of this cluster (certificate-authority in the"
                " kubeconfig, ca.crt of the service account), and a name that its certificate has",
            )
    if isinstance(error, TimeoutError):
        what = "did not answer in time"
    elif isinstance(error, aiohttp.ClientConnectorError):
        what = f"cannot be reached: {reason_of(error.os_error)}"
    elif isinstance(error, ConnectionRefusedError):
        what = f"cannot be reached: {error}"
    else:
        what = f"closed the connection: {str(error) or type(error).__name__}"
    return UnreachableError(
        f"cannot {asked}: the API server at {server} {what}",
        hint="retrying until it answers; running pods are not affected",
    )


def reason_of(error: OSError) -> str:
    """Return the system's own text, without memory addresses or tuples."""
    if error.errno is not None and error.errno > 0:  # getaddrinfo's are negative
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _hint(code: int, asked: str) -> str | None:
    if code == _UNAUTHORIZED:
        return (
            "it does not accept these credentials: check those of the kubeconfig, or whether"
            " the service account was recreated after this pod"
        )
    if code == _FORBIDDEN:
        return (
            f"allow this client to {asked}: {_MANIFESTS} every right that the agent and the"
            " scheduler need, and `kubectl auth can-i --list --as=USER` shows its rights"
        )
    return None
