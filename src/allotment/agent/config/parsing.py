# SPDX-License-Identifier: Apache-2.0
"""A configuration's text into its structs, or one sentence that says what is wrong, and where.

NVIDIA's plugin ignores what it does not know; here that is an error with its path, for a key that
has no effect and says nothing is how a node goes unshared for weeks. What NVIDIA refuses is refused
with NVIDIA's words, so that a search for them finds the same answers.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

import msgspec

from allotment.agent.config.checks import findings
from allotment.agent.config.documents import Value, at, read
from allotment.agent.config.hints import choices_at, hint_for, pattern_of
from allotment.agent.config.schema import ConfigFile
from allotment.model.errors import UsageError

__all__ = ["VERSION", "parse"]

VERSION: Final = "v1"

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<key>[^`]*)`")
_EXPECTED: Final = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_PLACE: Final = re.compile(r" - at `(?P<path>\$[^`]*)`$")

_MISSING_WORDS: Final[Mapping[tuple[str, str], str]] = {
    ("$.sharing.timeSlicing", "resources"): "no resources specified",
    ("$.sharing.mps", "resources"): "no resources specified",
    ("$.sharing.timeSlicing.resources[]", "name"): "no resource name specified",
    ("$.sharing.mps.resources[]", "name"): "no resource name specified",
    ("$.sharing.timeSlicing.resources[]", "replicas"): "no replicas specified",
    ("$.sharing.mps.resources[]", "replicas"): "no replicas specified",
    ("$.resources.gpus[]", "pattern"): "resources must have a 'pattern' field set",
    ("$.resources.gpus[]", "name"): "resources must have a 'name' field set",
    ("$.resources.mig[]", "pattern"): "resources must have a 'pattern' field set",
    ("$.resources.mig[]", "name"): "resources must have a 'name' field set",
}
"""NVIDIA's words for a key that has to be there, by its place."""

_KINDS: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number with a fraction",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys with values",
    "null": "nothing",
}
_LONGEST_SHOWN: Final = 80


def parse(text: str, *, source: str) -> ConfigFile:
    """Parse YAML or JSON; `source` names it in errors. An empty text says nothing.

    Raises `UsageError`: `source: $.path: what is wrong`.
    """
    document = read(text, source=source)
    if document is None:
        return ConfigFile()
    _check_version(document, source)
    try:
        file = msgspec.convert(document, ConfigFile)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explained(str(error), document, source) from error
    for finding in findings(file):
        raise UsageError(f"{source}: {finding.path}: {finding.message}", hint=finding.hint)
    return file


def _check_version(document: Value, source: str) -> None:
    """Judge the version before all else: another one has other keys."""
    version = document.get("version") if isinstance(document, dict) else None
    if version not in (None, "", VERSION):
        raise UsageError(
            f"{source}: $.version: unknown version: {_shown(version)}",
            hint=f"write `version: {VERSION}`, or leave it out",
        )


def _explained(message: str, document: Value, source: str) -> UsageError:
    """Put msgspec's message into the words of people who write YAML."""
    place = _PLACE.search(message)
    path = place["path"] if place else "$"
    what = message[: place.start()] if place else message
    if unknown := _UNKNOWN.match(what):
        key = unknown["key"]
        return UsageError(
            f"{source}: {path}.{_shown(key)}: there is no such key", hint=hint_for(key, path)
        )
    if missing := _MISSING.match(what):
        key = missing["key"]
        words = _MISSING_WORDS.get((pattern_of(path), key), f"`{key}` is missing")
        return UsageError(f"{source}: {path}: {words}", hint=f"add `{key}:`")
    if choices := choices_at(path):
        shown = _shown(at(document, path))
        near = get_close_matches(shown.lower(), choices, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return UsageError(f"{source}: {path}: '{shown}' is none of {', '.join(choices)}{meant}")
    if expected := _EXPECTED.match(what):
        return _wrong_kind(path, expected, at(document, path), source)
    return UsageError(f"{source}: {path}: {what}")


def _wrong_kind(path: str, match: re.Match[str], value: Value, source: str) -> UsageError:
    """Explain a value of another kind than wanted."""
    place, shown = pattern_of(path), _shown(value)
    hint = None
    wanted = [kind for kind in match["expected"].split(" | ") if kind != "null"]
    words = " or ".join(_KINDS.get(kind, kind) for kind in wanted)
    said = f"{shown} is {_KINDS.get(match['got'], match['got'])}, and it has to be {words}"
    if place.endswith((".deviceListStrategy", ".deviceListStrategy[]")):
        said = f"invalid deviceListStrategy: {shown}"
    elif place.endswith(".resources[].devices"):
        said = f"unrecognized type for devices spec: {shown}"
    elif place.endswith(".resources[].devices[]"):
        said = f"unsupported type for device in devices list: {shown}"
    elif place.endswith(".sleepInterval"):
        hint = f"write it with a unit: {shown}s (NVIDIA's plugin takes it for nanoseconds)"
    elif match["got"] == "str" and set(wanted) <= {"int", "bool"}:
        hint = "write it without quotes"
    return UsageError(f"{source}: {path}: {said}", hint=hint)


def _shown(value: Value) -> str:
    """Show a value of the file in one short line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
