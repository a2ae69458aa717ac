# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview v1: bytes in, bytes out. No decisions.

An answer is a refusal or a JSON patch (RFC 6902). Any client may send a body to the port, so only
needed fields are decoded, and anything but a review is refused with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from allotment.model.errors import UsageError
from allotment.model.formats import shortened

MAX_REVIEW_BYTES = 4 << 20
"""The largest body. An object has at most 1.5 MiB in etcd and 3 MiB in a request of the API server
(apiserver pkg/server/config.go, MaxRequestBodyBytes); the rest is the review's own fields."""

_API_VERSION = "admission.k8s.io/v1"
_KIND = "AdmissionReview"
_MAX_WARNING = 256
"""Longer warnings may be truncated, and all together beyond 4096 (Kubernetes, "Response")."""
_MAX_WARNINGS = 4096


class _Wire(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of a review; other fields are not decoded."""


class UserInfo(_Wire):
    """The API server's client."""

    username: str = ""
    groups: list[str] | None = None


class _Resource(_Wire):
    group: str = ""
    version: str = ""
    resource: str = ""


class ReviewRequest(_Wire):
    """The API server's request. Objects are not yet decoded."""

    uid: str
    operation: str = ""
    """CREATE, UPDATE, DELETE or CONNECT."""
    resource: _Resource = msgspec.field(default_factory=_Resource)
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    user_info: UserInfo = msgspec.field(default_factory=UserInfo)
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_of_pods(self) -> bool:
        """Whether it is about whole pods, not a subresource."""
        return (
            not self.resource.group and self.resource.resource == "pods" and not self.sub_resource
        )


class _Review(_Wire):
    api_version: str = ""
    kind: str = ""
    request: ReviewRequest | None = None


class _Status(_Wire, omit_defaults=True):
    message: str = ""
    reason: str = ""
    code: int = 0


class _Response(_Wire, omit_defaults=True):
    uid: str
    allowed: bool
    status: _Status | None = None
    patch_type: str = ""
    patch: bytes = b""
    """msgspec writes bytes in base64, as the API server reads them."""
    warnings: list[str] | None = None


class _Answered(_Wire):
    response: _Response
    api_version: str = _API_VERSION
    kind: str = _KIND


class PatchStep(msgspec.Struct, frozen=True):
    """One step of a JSON patch: `add` (or replace) or `remove` a value."""

    op: str
    path: str
    value: object = None

    def as_json(self) -> dict[str, object]:
        step: dict[str, object] = {"op": self.op, "path": self.path}
        return step if self.op == "remove" else step | {"value": self.value}


class ReviewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: a refusal, or changes by `steps` in their order."""

    refusal: str = ""
    """Why the object is refused; empty: it is allowed."""
    code: int = 0
    """HTTP status of a refusal; `reason` is Kubernetes' word for it."""
    reason: str = ""
    steps: tuple[PatchStep, ...] = ()
    warnings: tuple[str, ...] = msgspec.field(default=())
    """kubectl shows them to the object's author."""


class Reply(msgspec.Struct, frozen=True):
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = "application/json"


class AdmissionHandler(Protocol):
    """Answers a POST. Never blocks, never raises."""

    def __call__(self, body: bytes, /) -> Reply: ...


_REVIEW = msgspec.json.Decoder(_Review)
_ENCODER = msgspec.json.Encoder()
_OK, _BAD_REQUEST = 200, 400
_TEXT = "text/plain; charset=utf-8"


def replied(body: bytes, review: Callable[[ReviewRequest], ReviewAnswer]) -> Reply:
    """Answer any review; HTTP status 400 for anything else."""
    try:
        request = read_review(body)
    except UsageError as error:
        # For other clients: the API server always sends a review.
        return Reply(_BAD_REQUEST, error.one_line().encode(), _TEXT)
    return Reply(_OK, answered(request, review(request)))


def read_review(body: bytes) -> ReviewRequest:
    """Read the API server's request. Raises `UsageError` for anything else."""
    if len(body) > MAX_REVIEW_BYTES:
        raise UsageError(
            f"the body has {len(body)} bytes, more than the limit of {MAX_REVIEW_BYTES}",
            hint="no object is that large",
        )
    try:
        review = _REVIEW.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"the body is not an {_KIND}: {error}",
            hint="only a Kubernetes API server should call this address",
        ) from error
    if review.kind != _KIND or review.api_version != _API_VERSION:
        version = f"{review.api_version[:60]!r} {review.kind[:60]!r}"
        raise UsageError(
            f"the body is {version}, not {_KIND} of {_API_VERSION}",
            hint="write `admissionReviewVersions: [v1]` into the webhook's configuration",
        )
    if review.request is None or not review.request.uid:
        raise UsageError(
            f"the {_KIND} has no request with a uid",
            hint="set request.uid: the answer repeats it",
        )
    return review.request


def answered(request: ReviewRequest, answer: ReviewAnswer) -> bytes:
    response = _Response(uid=request.uid, allowed=not answer.refusal)
    if answer.refusal:
        response.status = _Status(message=answer.refusal, reason=answer.reason, code=answer.code)
    elif answer.steps:
        response.patch_type = "JSONPatch"
        response.patch = _ENCODER.encode([step.as_json() for step in answer.steps])
    if answer.warnings:
        response.warnings = list(_bounded(answer.warnings))
    return _ENCODER.encode(_Answered(response=response))


def pointer(*parts: str | int) -> str:
    """Return the JSON pointer (RFC 6901) of a part of a document: `/metadata/labels/a~1b`."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part}" for part in escaped)


def merged(
    parent: Sequence[str | int], values: Mapping[str, str], *, is_there: bool
) -> Iterator[PatchStep]:
    """Yield the steps that set values in the map at `parent`, creating it if missing."""
    if not values:
        return
    if not is_there:
        yield PatchStep("add", pointer(*parent), dict(values))
        return
    for key, value in values.items():
        yield PatchStep("add", pointer(*parent, key), value)


def _bounded(warnings: Iterable[str]) -> Iterator[str]:
    left = _MAX_WARNINGS
    for warning in warnings:
        text = " ".join(warning.split())  # a warning is a header's value: one line
        text = shortened(text, _MAX_WARNING)
        left -= len(text)
        if left >= 0:
            yield text
