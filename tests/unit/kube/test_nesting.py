# SPDX-License-Identifier: Apache-2.0
"""What is nested too deep is cut out, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.clients import decoded, shallow

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab{}[]"\\\n\u00e9'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('a{"\\'), inner, max_size=3)
    ),
)


def cut(value: Any, levels: int) -> Any:  # noqa: ANN401 - JSON
    """Do the same to what has been decoded."""
    if isinstance(value, list):
        return [cut(each, levels - 1) for each in value] if levels else None
    if isinstance(value, dict):
        return {key: cut(each, levels - 1) for key, each in value.items()} if levels else None
    return value


@given(values, st.integers(0, 5), st.booleans())
def test_as_deep_as_may_be_all_stays_as_it_was(
    value: object,
    levels: int,
    is_ascii: bool,  # noqa: FBT001 - drawn
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert json.loads(shallow(text, levels=levels)) == cut(value, levels)


@given(st.binary() | st.text(alphabet='{}[]"\\,:a').map(str.encode), st.integers(0, 5))
def test_whatever_it_is_no_more_levels_are_left(data: bytes, levels: int) -> None:
    found = shallow(data, levels=levels)
    assert shallow(found, levels=levels) == found


def test_an_answer_is_read_but_for_what_is_too_deep() -> None:
    deep = b'{"x":' * 9_000 + b"[]" + b"}" * 9_000
    body = b'{"items":[{"a":1},{"a":%b}],"b":2}' % deep
    found = decoded(msgspec.json.Decoder(), body, asked="list")
    assert (found["items"][0], found["b"]) == ({"a": 1}, 2)
    typed = decoded(msgspec.json.Decoder(dict[str, msgspec.Raw]), body, asked="list")
    assert bytes(typed["b"]) == b"2"
