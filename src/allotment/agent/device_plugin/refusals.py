# SPDX-License-Identifier: Apache-2.0
"""How an error is told to the kubelet, which puts it into the pod's events as it is.

Error: device plugin PreStartContainer rpc failed with err: rpc error:
code = ResourceExhausted desc = no GPU has 8Gi left; ...; hint: ...
"""

from collections.abc import Mapping
from typing import Final

import grpc

from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NoDevicesError,
    NotFoundError,
    PrerequisiteError,
    StateError,
    UsageError,
)

__all__ = ["code_of", "one_line"]

# The first class that an error is of counts.
_CODES: Final[Mapping[type[AllotError], grpc.StatusCode]] = {
    UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    DoesNotFitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.UNAVAILABLE,
    StateError: grpc.StatusCode.FAILED_PRECONDITION,
    PrerequisiteError: grpc.StatusCode.FAILED_PRECONDITION,
}

_LONGEST: Final = 800
"""Characters. An event's message ends at 1024, and the kubelet's own words come first."""


def code_of(error: AllotError) -> grpc.StatusCode:
    """Return the gRPC code that an error is nearest to."""
    found = (code for kind, code in _CODES.items() if isinstance(error, kind))
    return next(found, grpc.StatusCode.UNKNOWN)


def one_line(error: AllotError) -> str:
    """Return message and hint as one line that fits into an event."""
    message = _joined(error.message)
    hint = f"; hint: {_joined(error.hint)}" if error.hint else ""
    room = _LONGEST - len(hint)
    if len(message) > room:
        message = message[: max(0, room - 1)] + "…"
    return (message + hint)[:_LONGEST]


def _joined(text: str) -> str:
    """Join lines, each of which may be a sentence of its own."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    joined = ""
    for line in filter(None, lines):
        if joined:
            joined += " " if joined.endswith((":", ";", ",")) else "; "
        joined += line
    return joined
