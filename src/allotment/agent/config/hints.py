# SPDX-License-Identifier: Apache-2.0
"""What someone meant who wrote a key where it is not known: a mistyped or a misplaced one.

NVIDIA's plugin ignores such a key, and with it all that is below: a `sharing` that is indented once
too often gives no sharing and no error. Here it is refused, and the hint says where it belongs.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import inspect

from allotment.agent.config.schema import ConfigFile

__all__ = ["choices_at", "hint_for", "keys", "pattern_of"]

_MANIFEST: Final = {"apiVersion", "kind", "metadata", "data"}


def pattern_of(path: str) -> str:
    """Return the path with `[]` for each index: `$.sharing.timeSlicing.resources[]`."""
    return re.sub(r"\[[^\]]*\]", "[]", path)


@functools.cache
def keys() -> Mapping[str, tuple[str, ...]]:
    """Return the keys that are known at each place of the file, by its pattern."""
    return {path: names for path, names, _ in _walk(inspect.type_info(ConfigFile), "$") if names}


def choices_at(path: str) -> tuple[str, ...]:
    """Return the texts that a place may have; empty: it is not limited to some."""
    return _choices().get(pattern_of(path), ())


@functools.cache
def _choices() -> Mapping[str, tuple[str, ...]]:
    walked = _walk(inspect.type_info(ConfigFile), "$")
    return {path: choices for path, _, choices in walked if choices}


def hint_for(key: str, path: str) -> str:
    """Say what was probably meant by a key that is not known at a path."""
    if path == "$" and key in _MANIFEST:
        return "this is a manifest: what is below its `data` are the configurations, by name"
    known = keys().get(pattern_of(path), ())
    if exact := _places(key):
        return f"`{key}` belongs {' or '.join(exact)}: check the indentation"
    if close := _close(key, known):
        return f"did you mean `{close}`?"
    elsewhere = {name for names in keys().values() for name in names}
    if close := _close(key, elsewhere):
        return f"did you mean `{close}`? It belongs {' or '.join(_places(close))}"
    return f"keys that are known here: {', '.join(known)}" if known else "leave it out"


def _places(key: str) -> list[str]:
    places = sorted(path for path, names in keys().items() if key in names)
    return [
        f"under `{path[2:]}`" if path != "$" else "at the beginning of a line" for path in places
    ]


def _close(key: str, known: tuple[str, ...] | set[str]) -> str | None:
    folded = {name.casefold(): name for name in sorted(known)}
    close = difflib.get_close_matches(key.casefold(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def _walk(kind: inspect.Type, path: str) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield each place with the keys that it has, and with the texts that it may be."""
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
