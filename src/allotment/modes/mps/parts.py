# SPDX-License-Identifier: Apache-2.0
"""What each share of a GPU has of its daemon: a folder that is its programs' pipe directory.

The folder has one path whatever the daemon's protocol, for a container's mounts are told before its
daemon starts. By protocol 2 it is a link to the daemon's own pipe directory. By protocol 3 it holds
a second name of the socket of the share's namespace, whose limits are the daemon's word: a folder
of ours stays when a daemon is followed by another, and a container that has it mounted finds the
next one's socket there.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from allotment.modes.mps.controls import Control, MpsUnreachableError
from allotment.modes.mps.namespaces import NamespaceControl, folder_of
from allotment.modes.mps.places import MpsPlace
from allotment.modes.mps.settings import Limits

__all__ = ["Parts"]

_SOCKET: Final = "control"


class Parts:
    """The parts that one daemon's shares have. For its supervisor."""

    def __init__(self, place: MpsPlace) -> None:
        """Know where they are; of the daemon nothing is known yet."""
        self._place = place
        self._made: dict[str, Limits] = {}
        self._left: frozenset[str] = frozenset()
        """Namespaces that nobody needs and that could not be deleted."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those whose programs can start."""
        return tuple(sorted(self._made))

    def forget(self) -> None:
        """Make all of them anew: the daemon is another, or what it has is not known."""
        self._made.clear()

    def are(self, wanted: Mapping[str, Limits | None]) -> bool:
        """Tell whether there is nothing to do."""
        is_made = all(
            limits is None or self._made.get(name) == limits for name, limits in wanted.items()
        )
        return is_made and self._made.keys() <= wanted.keys() and not self._left

    def update(self, control: Control, wanted: Mapping[str, Limits | None]) -> str:
        """Make what is missing and remove what nobody needs; return what went wrong, if anything.

        One whose limits are None stays as it is: programs may have it, and what they may have is
        not known. One that cannot be made is missing from `names`, and tried again the next time.
        """
        try:
            there = self._clear(control, wanted)
        except MpsUnreachableError as error:
            return str(error)
        problems = []
        for name, limits in wanted.items():
            if limits is None or self._made.get(name) == limits:
                continue
            self._made.pop(name, None)
            try:
                self._make(control, name, limits, is_there=name in there)
            except (MpsUnreachableError, OSError) as error:
                problems.append(str(error))
            else:
                self._made[name] = limits
        return "; ".join(problems)

    def _clear(self, control: Control, wanted: Mapping[str, object]) -> frozenset[str]:
        """Remove what nobody needs; return the names of the namespaces that are there."""
        there = frozenset[str]()
        left = set[str]()
        if isinstance(control, NamespaceControl):
            there = control.namespaces()
            for name in there - wanted.keys():
                try:
                    control.delete(name)
                except MpsUnreachableError:  # it has clients yet: the next time
                    left.add(name)
        self._left = frozenset(left)
        for name in self._made.keys() - wanted.keys():
            del self._made[name]
        for path in self._place.parts.iterdir() if self._place.parts.is_dir() else ():
            if path.name not in wanted:
                _remove(path)
        return there

    def _make(self, control: Control, name: str, limits: Limits, *, is_there: bool) -> None:
        path = self._place.part(name)
        if isinstance(control, NamespaceControl):
            if not is_there:
                control.create(name)
            control.limit(name, limits)
            if path.is_symlink():
                path.unlink()
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            _name_again(folder_of(control.pipes, name) / _SOCKET, path / _SOCKET)
        elif path.is_dir() and not path.is_symlink():
            # Mounted, perhaps, from a daemon with namespaces that could not be had again.
            _name_again(self._place.pipes / _SOCKET, path / _SOCKET)
        elif not path.is_symlink():
            path.symlink_to(os.path.relpath(self._place.pipes, path.parent))


def _name_again(socket: Path, name: Path) -> None:
    if name.exists() and name.samefile(socket):
        return
    name.unlink(missing_ok=True)
    os.link(socket, name)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
