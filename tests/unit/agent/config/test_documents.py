# SPDX-License-Identifier: Apache-2.0
"""YAML is read as Go reads it, and nothing but data is."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.parsing import MAX_TEXT, Value, at, read
from allotment.model.errors import UsageError

TEXTS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0xFFFD, exclude_categories=["C"]), max_size=60
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def said(text: str) -> Value:
    return read(text, source="f")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("[0:1, 12:30]", ["0:1", "12:30"]),
        ("2026-11-21", "2026-11-21"),
        ("[yes, off, true]", [True, False, True]),
        ("[1.5, 1e3, 0x10, 010, -4]", [1.5, 1000.0, 16, 8, -4]),
        ("{79: ignore, true: 1}", {"79": "ignore", "true": 1}),
        ("{a: &b {c: 1}, d: {<<: *b, e: 2}}", {"a": {"c": 1}, "d": {"c": 1, "e": 2}}),
        (
            "{a: &b {c: 1}, d: {<<: [*b, {c: 3, f: 4}], c: 5}}",
            {"a": {"c": 1}, "d": {"c": 5, "f": 4}},
        ),
        ("{a: &b {c: 1}, d: {<<: [*b, {c: 3}]}}", {"a": {"c": 1}, "d": {"c": 1}}),
        ("a: ~\nb:\n", {"a": None, "b": None}),
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
    ],
    ids=str,
)
def test_values_are_those_of_go(text: str, value: Value) -> None:
    assert said(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is given twice (line 3, column 1)"),
        ("&a [*a]", "recursive"),
        ("a: &a {b: *a}", "recursive"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("a: !!binary aGk=", "could not determine a constructor"),
        ("a: !!timestamp 2026-11-21", "could not determine a constructor"),
        ("{[1]: 2}", "a key has to be a text"),
        ("{a: 1, <<: 3}", "<< wants a mapping"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: [", "line 1"),
        ("[" * 3000, "recursion"),
        ("a: \x00", "unacceptable character"),
        ('a: "\\ud83d"', "half of a character"),
        ("a: " + "9" * 5000, "digits"),
        ("x" * (MAX_TEXT + 1), "characters are more than"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_data_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        said(text)
    assert caught.value.message.startswith("f: ")
    assert problem in caught.value.message


@given(PLAIN)
def test_json_is_read_as_it_was_written(value: Value) -> None:
    assert said(json.dumps(value)) == value


@given(st.text(alphabet="{}[]:,-&*!?|>'\"%@`# \n\tabc019.~<", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(UsageError):
        said(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$", {"a": [{"b": 1}]}),
        ("$.a[0].b", 1),
        ("$.a[1].b", None),
        ("$.a.b", None),
        ("$.x[0]", None),
    ],
)
def test_at_finds_what_is_at_a_path(path: str, value: Value) -> None:
    assert at({"a": [{"b": 1}]}, path) == value
