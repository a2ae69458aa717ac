# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between us and the API server, each with the next step.

    KubeError                 1   the API server refused, or answered what is not understood
    ├── UnreachableError          no answer: refused, timed out, a certificate that does not fit
    ├── DeniedError               401 and 403: it does not know us, or does not let us
    ├── ObjectMissingError        404
    ├── ConflictError             409
    └── GoneError                 410: what is asked about lies too far back; list again

The number is the exit code of `allot`, as for any `AllotError`.
"""

import ssl
from collections.abc import Iterator

import httpx2
import msgspec

from allotment.model.errors import AllotError

__all__ = [
    "ConflictError",
    "DeniedError",
    "GoneError",
    "KubeError",
    "ObjectMissingError",
    "UnreachableError",
    "explain_failure",
    "explain_refusal",
]

_UNAUTHORIZED = 401
_FORBIDDEN = 403
_NOT_FOUND = 404
_CONFLICT = 409
_GONE = 410
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_MANIFESTS = "deploy/manifests/agent.yaml and scheduler.yaml have"


class KubeError(AllotError):
    """The API server did not do what it was asked.

    `status` is the HTTP status, None where nothing was answered. `retry_after_s`: the server asks
    to be left alone for so long.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep what was answered."""
        super().__init__(message, hint=hint)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """The same request may well succeed later: nothing about it is wrong."""
        return (
            self.status is None or self.status == _TOO_MANY_REQUESTS or self.status >= _SERVER_ERROR
        )


class UnreachableError(KubeError):
    """There was no answer."""


class DeniedError(KubeError):
    """The API server does not know who asks, or does not let them."""


class ObjectMissingError(KubeError):
    """There is no such object."""


class ConflictError(KubeError):
    """Someone else changed or made it meanwhile."""


class GoneError(KubeError):
    """The API server has forgotten that far back: list again."""


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
    """What the API server says of a failure (`kind: Status`)."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None


def explain_refusal(
    body: bytes, *, asked: str, status: int | None = None, retry_after: str | None = None
) -> KubeError:
    """Make the error of an answer.

    `asked` is what was asked, in words: `list pods`. `status` None: the one that `body`, a Status
    object, names (so it is inside a watch). `retry_after`: that header.
    """
    try:
        told = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A proxy's page, say: the status alone has to do.
        told = _Status()
    code = status or told.code or _SERVER_ERROR
    seconds = told.details.retry_after_seconds if told.details else None
    if retry_after and retry_after.isdecimal():
        seconds = int(retry_after)
    why = told.message or told.reason or f"HTTP status {code}"
    return _CLASSES.get(code, KubeError)(
        f"the API server refused to {asked}: {why}",
        hint=_hint(code, asked),
        status=code,
        retry_after_s=seconds,
    )


def explain_failure(error: httpx2.HTTPError | OSError, *, asked: str, server: str) -> KubeError:
    """Make the error of a request that got no answer."""
    for each in _causes(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return UnreachableError(
                f"cannot {asked}: the certificate of the API server at {server} is not to be"
                f" trusted: {getattr(each, 'verify_message', each)}",
                hint="use the certificate authority of this cluster (certificate-authority in the"
                " kubeconfig, ca.crt of the service account), and a name that its certificate has",
            )
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        what = "did not answer in time"
    elif isinstance(error, httpx2.ConnectError):
        what = f"cannot be reached: {error}"
    else:
        what = f"broke the connection off: {str(error) or type(error).__name__}"
    return UnreachableError(
        f"cannot {asked}: the API server at {server} {what}",
        hint="it is asked again until it answers; pods that run are not affected",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _hint(code: int, asked: str) -> str | None:
    if code == _UNAUTHORIZED:
        return (
            "it does not know this client: look at the credentials of the kubeconfig, or whether"
            " the service account has been made anew since this pod was"
        )
    if code == _FORBIDDEN:
        return (
            f"allow this client to {asked}: {_MANIFESTS} every right that the agent and the"
            " scheduler need, and `kubectl auth can-i --list --as=USER` shows those it has"
        )
    return None
