# SPDX-License-Identifier: Apache-2.0
"""What is not installed is said with how to install it; a fault of our own stays a fault."""

import pytest

from allotment.cli.options import installed
from allotment.model.errors import PrerequisiteError


def test_what_is_missing_is_named_with_what_installs_it() -> None:
    with (
        pytest.raises(PrerequisiteError) as error,
        installed("allot agent", extra="kubernetes"),
    ):
        import nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401
    assert "`allot agent` needs nothing_of_that_name" in error.value.message
    assert "pip install 'allotment[kubernetes]'" in (error.value.hint or "")


def test_what_is_missing_of_our_own_is_a_fault() -> None:
    with pytest.raises(ModuleNotFoundError), installed("allot agent", extra="kubernetes"):
        import allotment.nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401
