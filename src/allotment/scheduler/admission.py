# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview v1, as the API server writes and reads it: bytes in, bytes out.

The API server asks before it stores an object, and takes an answer as a list of changes or a
refusal. Here is the wire alone: what is asked, what is answered, how a change of a document is
written down (RFC 6902). What the answer is to be, others decide.

Everything that comes is somebody's: also who may not create a pod may send a body to the port. So
nothing is decoded but what is looked at, and what is not a review is refused with the reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from allotment.model.errors import UsageError

__all__ = [
    "MAX_BODY_BYTES",
    "Answer",
    "ReviewRequest",
    "Step",
    "UserInfo",
    "answered",
    "merged",
    "pointer",
    "read_review",
]

MAX_BODY_BYTES = 4 << 20
"""The largest body that is read. An object has at most 1.5 MiB in etcd, 3 MiB in a request of the
API server (apiserver pkg/server/config.go, MaxRequestBodyBytes); the rest is what a review adds."""

_API_VERSION = "admission.k8s.io/v1"
_KIND = "AdmissionReview"
_MAX_WARNING = 256
"""Longer warnings may be cut, and all of them together: 4096 (Kubernetes, "Response")."""
_MAX_WARNINGS = 4096


class _Wire(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of a review; what it does not name is not decoded."""


class UserInfo(_Wire):
    """Who asks the API server."""

    username: str = ""
    groups: list[str] | None = None


class _Resource(_Wire):
    group: str = ""
    version: str = ""
    resource: str = ""


class ReviewRequest(_Wire):
    """What the API server is about to do. Objects are as they came, not yet decoded."""

    uid: str
    operation: str = ""
    """CREATE, UPDATE, DELETE or CONNECT."""
    resource: _Resource = msgspec.field(default_factory=_Resource)
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    user_info: UserInfo = msgspec.field(default_factory=UserInfo)
    object: msgspec.Raw = msgspec.Raw(b"null")
    dry_run: bool | None = None
    """Nothing will be stored: nothing may be done that outlives the answer."""

    @property
    def is_of_pods(self) -> bool:
        """Whether it is about pods themselves, and no part of one."""
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
    """msgspec writes bytes in base64, which is how the API server reads them."""
    warnings: list[str] | None = None


class _Answered(_Wire):
    response: _Response
    api_version: str = _API_VERSION
    kind: str = _KIND


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a JSON patch: `add` (or replace) a value, or `remove` what is there."""

    op: str
    path: str
    value: object = None

    def as_json(self) -> dict[str, object]:
        """Return the step as RFC 6902 has it."""
        step: dict[str, object] = {"op": self.op, "path": self.path}
        return step if self.op == "remove" else step | {"value": self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What becomes of the object: changed by `steps`, in their order, unless it is refused."""

    refusal: str = ""
    """Why it is not to be; empty: it may."""
    code: int = 0
    """The HTTP status of a refusal, and its reason in Kubernetes' words."""
    reason: str = ""
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    """What kubectl shows to whoever created the object."""


_REVIEW = msgspec.json.Decoder(_Review)
_ENCODER = msgspec.json.Encoder()


def read_review(body: bytes) -> ReviewRequest:
    """Read what the API server asks. Raises `UsageError`: it is no review that can be answered."""
    if len(body) > MAX_BODY_BYTES:
        raise UsageError(
            f"the body has {len(body)} bytes, more than the {MAX_BODY_BYTES} that are read",
            hint="an object of this size can be no pod",
        )
    try:
        review = _REVIEW.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"the body is no {_KIND}: {error}",
            hint="only a Kubernetes API server should call this address",
        ) from error
    if review.kind != _KIND or review.api_version != _API_VERSION:
        found = f"{review.api_version[:60]!r} {review.kind[:60]!r}"
        raise UsageError(
            f"the body is {found}, not {_KIND} of {_API_VERSION}",
            hint="write `admissionReviewVersions: [v1]` into the webhook's configuration",
        )
    if review.request is None or not review.request.uid:
        raise UsageError(
            f"the {_KIND} has no request with a uid",
            hint="an answer cannot be told to belong to it",
        )
    return review.request


def answered(request: ReviewRequest, answer: Answer) -> bytes:
    """Write an answer for the API server."""
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
) -> Iterator[Step]:
    """Yield the steps that put values into the map at `parent`, which is there or is made."""
    if not values:
        return
    if not is_there:
        yield Step("add", pointer(*parent), dict(values))
        return
    for key, value in values.items():
        yield Step("add", pointer(*parent, key), value)


def _bounded(warnings: Iterable[str]) -> Iterator[str]:
    left = _MAX_WARNINGS
    for each in warnings:
        text = " ".join(each.split())  # a warning is a header's value: one line
        text = text if len(text) <= _MAX_WARNING else f"{text[: _MAX_WARNING - 3]}..."
        left -= len(text)
        if left >= 0:
            yield text
