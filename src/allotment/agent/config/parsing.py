# SPDX-License-Identifier: Apache-2.0
"""Parses a configuration, or names the error and its place in one sentence.

NVIDIA's plugin ignores unknown keys; here they are errors, because a typo could leave a node
unshared for weeks. Errors that NVIDIA reports, too, have NVIDIA's words, so that they can be found.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec
import yaml
from msgspec import inspect
from yaml.constructor import ConstructorError

from allotment.agent.config.checks import check_file, within
from allotment.agent.config.schema import ConfigFile
from allotment.model.errors import UsageError
from allotment.model.structs import prepared

_MANIFEST: Final = {"apiVersion", "kind", "metadata", "data"}


def pattern_of(path: str) -> str:
    """Return the path with `[]` for each index: `$.sharing.timeSlicing.resources[]`."""
    return re.sub(r"\[[^\]]*\]", "[]", path)


@functools.cache
def keys() -> Mapping[str, tuple[str, ...]]:
    """Return the valid keys at each place of the file, by its pattern."""
    return {path: names for path, names, _ in _walk(inspect.type_info(ConfigFile), "$") if names}


def choices_at(path: str) -> tuple[str, ...]:
    """Return the valid texts at a place; empty: any."""
    return _choices().get(pattern_of(path), ())


@functools.cache
def _choices() -> Mapping[str, tuple[str, ...]]:
    walked = _walk(inspect.type_info(ConfigFile), "$")
    return {path: choices for path, _, choices in walked if choices}


def hint_for(key: str, path: str) -> str:
    """Suggest a correction for an unknown key."""
    if path == "$" and key in _MANIFEST:
        return "this is a manifest: its `data` has the configurations, by name"
    known = keys().get(pattern_of(path), ())
    if exact := _places(key):
        return f"`{key}` belongs {' or '.join(exact)}: check the indentation"
    if close := _close(key, known):
        return f"did you mean `{close}`?"
    elsewhere = {name for names in keys().values() for name in names}
    if close := _close(key, elsewhere):
        return f"did you mean `{close}`? It belongs {' or '.join(_places(close))}"
    return f"valid keys: {', '.join(known)}" if known else "leave it out"


def _places(key: str) -> list[str]:
    places = sorted(path for path, names in keys().items() if key in names)
    return [
        f"under `{path[2:]}`" if path != "$" else "at the beginning of a line" for path in places
    ]


def _close(key: str, known: tuple[str, ...] | set[str]) -> str | None:
    folded = {name.casefold(): name for name in sorted(known)}
    close = get_close_matches(key.casefold(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def _walk(kind: inspect.Type, path: str) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield each place with its valid keys and its valid texts."""
    match kind:
        case inspect.StructType(fields=fields):
            yield path, tuple(field.encode_name for field in fields), ()
            for field in fields:
                yield from _walk(field.type, f"{path}.{field.encode_name}")
        case inspect.UnionType(types=types):
            for each in types:
                yield from _walk(each, path)
        case inspect.ListType(item_type=item):
            yield from _walk(item, f"{path}[]")
        case inspect.DictType(value_type=value):
            yield from _walk(value, f"{path}[]")
        case inspect.LiteralType(values=values):
            yield path, (), tuple(str(value) for value in values)
        case _:
            pass


Value = None | bool | int | float | str | list[Any] | dict[str, Any]
"""A part of a document."""

MAX_TEXT: Final = 128 * 1024
"""In characters. A realistic configuration has a few thousand."""

_MERGE: Final = "tag:yaml.org,2002:merge"
_INT: Final = re.compile(
    r"[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+"
)
_FLOAT: Final = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """PyYAML's reader with Go's scalars, for data only."""


class _Construction:
    """Builds values from nodes. In a class, so that PyYAML's registry finds them by name."""

    @staticmethod
    def mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Value]:
        own: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for each in _Construction.merged(loader, value_node):
                    merged = each | merged
                continue
            key = _Construction.key(loader, key_node)
            if key in own:
                raise ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            own[key] = loader.construct_object(value_node, deep=True)
        return merged | own

    @staticmethod
    def merged(loader: _Loader, node: yaml.Node) -> Iterator[dict[str, Value]]:
        value = loader.construct_object(node, deep=True)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise ConstructorError(None, None, "<< wants a mapping", node.start_mark)
            yield each

    @staticmethod
    def sequence(loader: _Loader, node: yaml.SequenceNode) -> list[Value]:
        return [loader.construct_object(each, deep=True) for each in node.value]

    @staticmethod
    def text(loader: _Loader, node: yaml.ScalarNode) -> str:
        text = str(loader.construct_scalar(node))
        # JSON writes some characters as surrogates, `\ud83d\ude00`; YAML has one escape for them.
        if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
            raise ConstructorError(None, None, "half of a character", node.start_mark)
        return text

    @staticmethod
    def key(loader: _Loader, node: yaml.Node) -> str:
        key = loader.construct_object(node, deep=True)
        match key:
            case str():
                return key
            case bool():
                return "true" if key else "false"
            case int() | float():
                return str(key)
        raise ConstructorError(None, None, "a key has to be a text", node.start_mark)


def _strict_loader() -> type[_Loader]:
    """Replace the scalars and tags of PyYAML's safe reader."""
    kept = {"null", "bool", "int", "float"}
    _Loader.yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in kept
    }
    _Loader.add_constructor("tag:yaml.org,2002:str", _Construction.text)
    _Loader.add_constructor("tag:yaml.org,2002:map", _Construction.mapping)
    _Loader.add_constructor("tag:yaml.org,2002:seq", _Construction.sequence)
    dropped = {"int", "float", "timestamp", "value"}
    _Loader.yaml_implicit_resolvers = {
        first: [each for each in resolvers if each[0].rpartition(":")[2] not in dropped]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _whole("int", _INT, "-+0123456789")
    _whole("float", _FLOAT, "-+0123456789.")
    return _Loader


def _whole(tag: str, pattern: re.Pattern[str], first: str) -> None:
    anchored = re.compile(f"^(?:{pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", anchored, list(first))


_LOADER: Final = _strict_loader()


def read(text: str, *, source: str) -> Value:
    """Read one YAML or JSON document; `source` names it in errors.

    An empty text is None. Raises `UsageError`.
    """
    if len(text) > MAX_TEXT:
        raise UsageError(
            f"{source}: {len(text)} characters are more than a configuration can have ({MAX_TEXT})"
        )
    try:
        value: Value = yaml.load(text, Loader=_LOADER)  # noqa: S506 - a stricter SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, LookupError) as error:
        raise UsageError(
            f"{source}: it is not YAML: {_sentence(error)}",
            hint="check the indentation, and that each key is given once",
        ) from error
    return value


def at(document: Value, path: str) -> Value:
    """Return the value at a path like `$.sharing.timeSlicing.resources[0]`; None: none."""
    found = document
    for key, index in _STEP.findall(path.removeprefix("$")):
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and index and int(index) < len(found):
            found = found[int(index)]
        else:
            return None
    return found


def _sentence(error: Exception) -> str:
    """Return the problem and its place in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return str(error).partition("\n")[0] or type(error).__name__
    mark = error.problem_mark or error.context_mark
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    # Some of PyYAML's sentences begin in the context: `expected ...`, `but found ...`.
    words = [error.context, error.problem] if error.problem.startswith("but ") else [error.problem]
    return ", ".join(word for word in words if word) + place


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
"""NVIDIA's messages for missing keys, by place."""

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
    """Parse YAML or JSON; `source` names it in errors. The text may be empty.

    Raises `UsageError`: `source: $.path: what is wrong`.
    """
    document = read(text, source=source)
    if document is None:
        return ConfigFile()
    _check_version(document, source)
    try:
        file = msgspec.convert(document, prepared(ConfigFile))
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explained(str(error), document, source) from error
    with within(source):
        check_file(file)
    return file


def _check_version(document: Value, source: str) -> None:
    """Check the version first: another version has other keys."""
    version = document.get("version") if isinstance(document, dict) else None
    if version not in (None, "", VERSION):
        raise UsageError(
            f"{source}: $.version: unknown version: {_shown(version)}",
            hint=f"write `version: {VERSION}`, or leave it out",
        )


def _explained(message: str, document: Value, source: str) -> UsageError:
    """Translate msgspec's message into terms of YAML."""
    place = _PLACE.search(message)
    path = place["path"] if place else "$"
    what = message[: place.start()] if place else message
    if unknown := _UNKNOWN.match(what):
        key = unknown["key"]
        return UsageError(f"{source}: {path}.{_shown(key)}: unknown key", hint=hint_for(key, path))
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
    place, shown = pattern_of(path), _shown(value)
    hint = None
    wanted = [kind for kind in match["expected"].split(" | ") if kind != "null"]
    words = " or ".join(_KINDS.get(kind, kind) for kind in wanted)
    said = f"{shown} is {_KINDS.get(match['got'], match['got'])}, expected {words}"
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
    """Return a value in one short line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
