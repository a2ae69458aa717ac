# SPDX-License-Identifier: Apache-2.0
"""An error reaches the pod's event whole, in one line, with what to do."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.plugin.serving import MOST_EVENT, code_of
from allotment.model.errors import (
    AllotError,
    DoesNotFitError,
    LedgerError,
    QuantityError,
    UsageError,
)


def test_lines_become_one() -> None:
    error = DoesNotFitError(
        "no GPU has 8Gi left:\n  GPU-0  need 8Gi, have 2Gi\n\n  GPU-1  need 8Gi, have 0",
        hint="ask for less,\nor wait",
    )
    assert error.one_line(longest=MOST_EVENT) == (
        "no GPU has 8Gi left: GPU-0 need 8Gi, have 2Gi; GPU-1 need 8Gi, have 0;"
        " hint: ask for less, or wait"
    )


def test_what_is_too_long_keeps_its_hint() -> None:
    line = AllotError("x" * 5000, hint="ask for less").one_line(longest=MOST_EVENT)
    assert len(line) == 800
    assert line.endswith("x…; hint: ask for less")


@given(message=st.text(), hint=st.none() | st.text())
def test_every_error_is_one_line_of_bounded_length(message: str, hint: str | None) -> None:
    line = AllotError(message, hint=hint).one_line(longest=MOST_EVENT)
    assert len(line) <= 800
    assert len(line.splitlines()) <= 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AllotError("x"), grpc.StatusCode.UNKNOWN),
        (UsageError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (QuantityError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (DoesNotFitError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (LedgerError("x"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_code_is_of_the_nearest_class(error: AllotError, code: grpc.StatusCode) -> None:
    assert code_of(error) is code
