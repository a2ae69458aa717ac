# SPDX-License-Identifier: Apache-2.0
"""The feature file that Node Feature Discovery turns into node labels, and the machine type file.

NFD's worker reads every file of its folder that does not begin with a dot, at any moment: a file
has to appear whole, and under another name until then.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from allotment.agent.labels.features import UNKNOWN_MACHINE
from allotment.model.errors import StateError

__all__ = ["read_machine_type", "remove_feature_file", "write_feature_file", "written"]

_MODE = 0o644


def read_machine_type(path: str) -> str:
    """Return the text of a machine type file; a path that is empty or cannot be read: unknown."""
    if not path:
        return UNKNOWN_MACHINE
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return UNKNOWN_MACHINE


def written(labels: Mapping[str, str]) -> str:
    """Write labels as a feature file has them: one `key=value` a line."""
    return "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def write_feature_file(path: str, labels: Mapping[str, str]) -> bool:
    """Put the labels into the file, whole; return whether it had to change.

    An empty path means standard output, as for NVIDIA's. A file that says the same already is left
    alone, so that NFD does not look at it again. Raises `StateError` with the next step.
    """
    text = written(labels)
    if not path:
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    target = Path(path)
    try:
        if target.read_text(encoding="utf-8", errors="replace") == text:
            return False
    except OSError:
        pass  # there is none yet; what else may be wrong shows when it is written
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), _MODE)
            Path(draft).rename(target)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StateError(
            f"cannot write the feature file {path}: {error.strerror}",
            hint="mount Node Feature Discovery's folder features.d there, name another file with"
            " GFD_OUTPUT_FILE, or set USE_NODE_FEATURE_API=true to label the node by the API",
        ) from error
    return True


def remove_feature_file(path: str) -> None:
    """Remove the file if it is there; its labels go when NFD looks next."""
    if path:
        with contextlib.suppress(OSError):  # at the end nobody is left to be told
            Path(path).unlink(missing_ok=True)
