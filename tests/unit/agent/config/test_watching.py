# SPDX-License-Identifier: Apache-2.0
"""Changes of a file are seen however they are made, and one that hangs is no more than told."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar, cast

from allotment.agent.config.parsing import MAX_TEXT
from allotment.agent.configuring import watch_file, watch_folder
from allotment.model.errors import AllotError, NotFoundError, StateError, UsageError

_T = TypeVar("_T")

PERIOD_S = 0.01


def followed(changes: AsyncIterator[_T], *steps: Callable[[], object]) -> list[_T]:
    """Return what is yielded at first, and after each step."""

    async def follow() -> list[_T]:
        heard = []
        async with aclosing(cast("AsyncGenerator[_T]", changes)), asyncio.timeout(30):
            heard.append(await anext(changes))
            for step in steps:
                await asyncio.to_thread(step)
                heard.append(await anext(changes))
        return heard

    return asyncio.run(follow())


def followed_file(path: Path, *steps: Callable[[], object]) -> list[str | AllotError]:
    return followed(watch_file(path, period_s=PERIOD_S), *steps)


def written_over(path: Path, text: str) -> None:
    """Writes in place, in one step: a reader sees the text before or this one."""
    with path.open("r+") as file:
        file.write(text)


def renamed_over(path: Path, text: str) -> None:
    other = path.with_name("other")
    other.write_text(text)
    other.rename(path)


def test_a_file_is_followed_through_writes_and_renames(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a")
    assert followed_file(
        path,
        lambda: written_over(path, "b"),
        lambda: renamed_over(path, "c"),
        lambda: path.write_text(""),
    ) == ["a", "b", "c", ""]


def test_the_same_text_again_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a")

    def rewrite() -> None:
        for _ in range(5):
            renamed_over(path, "a")
        path.touch()
        written_over(path, "b")

    assert followed_file(path, rewrite) == ["a", "b"]


def mounted(volume: Path, version: str, files: dict[str, str]) -> None:
    """Write files as the kubelet writes a ConfigMap's: behind one link, which is swapped."""
    folder = volume / f"..{version}"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(Path("..data") / name)
    new = volume / "..data_tmp"
    new.symlink_to(folder.name)
    new.rename(volume / "..data")


def test_a_mounted_config_map_is_followed(tmp_path: Path) -> None:
    mounted(tmp_path, "v1", {"config.yaml": "a"})
    assert followed_file(
        tmp_path / "config.yaml", lambda: mounted(tmp_path, "v2", {"config.yaml": "b"})
    ) == ["a", "b"]


def test_a_mounted_folder_is_followed(tmp_path: Path) -> None:
    mounted(tmp_path, "v1", {"a": "1"})
    (tmp_path / "folder").mkdir()
    assert followed(
        watch_folder(tmp_path, period_s=PERIOD_S),
        lambda: mounted(tmp_path, "v2", {"a": "1", "b": "2"}),
        lambda: mounted(tmp_path, "v3", {"a": "3", "b": "2"}),
    ) == [{"a": "1"}, {"a": "1", "b": "2"}, {"a": "3", "b": "2"}]


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    missing, text, gone = followed_file(path, lambda: renamed_over(path, "a"), path.unlink)
    assert isinstance(missing, NotFoundError)
    assert str(path) in missing.message
    assert text == "a"
    assert isinstance(gone, NotFoundError)


def test_what_is_no_text_file_is_told(tmp_path: Path) -> None:
    (told,) = followed_file(tmp_path)
    assert isinstance(told, StateError)
    (tmp_path / "c.yaml").write_bytes(b"ab\xff")
    (told,) = followed_file(tmp_path / "c.yaml")
    assert isinstance(told, UsageError)
    assert "byte 2" in told.message
    (tmp_path / "c.yaml").write_bytes(b"a" * 8 * MAX_TEXT)
    (text,) = followed_file(tmp_path / "c.yaml")
    assert isinstance(text, str)
    assert MAX_TEXT < len(text) < 8 * MAX_TEXT
    (missing,) = followed(watch_folder(tmp_path / "x", period_s=PERIOD_S))
    assert isinstance(missing, StateError)


def test_a_reading_that_hangs_is_told_and_waited_for(tmp_path: Path) -> None:
    # To open a FIFO blocks until someone writes to it: like a file of a server that is gone.
    path = tmp_path / "c.yaml"
    os.mkfifo(path)
    hung, text = followed(
        watch_file(path, period_s=PERIOD_S, patience_s=0.1), lambda: path.write_text("a")
    )
    assert isinstance(hung, StateError)
    assert "no answer" in hung.message
    assert text == "a"
