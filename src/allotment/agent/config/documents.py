# SPDX-License-Identifier: Apache-2.0
"""YAML or JSON text as plain values: the same ones as NVIDIA's plugin gets of the same text.

Its reader is Go's: keys are texts, `0:1` is a text and no number to the base of sixty, `2026-11-21`
is a text and no date. PyYAML reads these otherwise, so that `devices: [0:1]` would silently be a
GPU of index 1. What is not data is refused: tags, a key given twice, values that hold themselves.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml
from yaml.constructor import ConstructorError

from allotment.model.errors import UsageError

__all__ = ["MAX_TEXT", "Value", "at", "read"]

Value = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What a document is made of: lists and mappings of the same again."""

MAX_TEXT: Final = 128 * 1024
"""Characters. The largest configuration that anyone can mean has a few thousand."""

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
    """PyYAML's reader with the scalars of Go's, and nothing but data."""


class _Construction:
    """Makes values of nodes. Functions of a class, so that PyYAML's registry finds them by name."""

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
        # JSON writes some characters as two halves, `\ud83d\ude00`; YAML has one escape for them.
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
    """Replace what PyYAML's safe reader makes of scalars and tags."""
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
    """Return what is at a path like `$.sharing.timeSlicing.resources[0]`; None: nothing."""
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
    """Say what is wrong and where, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return str(error).partition("\n")[0] or type(error).__name__
    mark = error.problem_mark or error.context_mark
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    # Some of PyYAML's sentences begin in the context: `expected ...`, `but found ...`.
    words = [error.context, error.problem] if error.problem.startswith("but ") else [error.problem]
    return ", ".join(word for word in words if word) + place
