# SPDX-License-Identifier: Apache-2.0
"""A native library that is cut off is named, with the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from allotment import libraries
from allotment.model.errors import LibraryBrokenError


def test_a_half_built_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / libraries.LEDGER
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(libraries, "library_path", lambda _: broken)
    with pytest.raises(LibraryBrokenError, match="cannot be loaded") as caught:
        libraries.load_library(libraries.LEDGER)
    assert "make native" in (caught.value.hint or "")
    assert str(broken) in caught.value.message
