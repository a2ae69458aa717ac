# SPDX-License-Identifier: Apache-2.0
"""Makes the developer's virtual environment: `python3 tools/make_venv.py FOLDER`.

`python3 -m venv` is enough where Python is whole. Debian and Ubuntu ship `python3` without
`ensurepip`, so that a venv comes out without pip; then this takes whichever is at hand: a pip
that can install into another environment, or the missing package when apt can be used. Else it
names the fix. Written for any Python 3, so that an old one gets a sentence and no traceback.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
PACKAGE = "python3-venv"


def fail(message: str, hint: str) -> None:
    """Ends with an error and the next step."""
    sys.exit(f"error: {message}\n\nhint: {hint}")


def has_module(name: str) -> bool:
    """Whether this Python could import `name`."""
    return importlib.util.find_spec(name) is not None


def install_with_apt() -> bool:
    """Installs Debian's missing package; False when that cannot be done from here."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    print(f"python3 has no ensurepip: installing {PACKAGE} with apt-get", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A fresh container has no package lists; where they cannot be renewed, old ones may do.
    apt = ["apt-get", "-qq", "--yes", "--no-install-recommends"]
    subprocess.run([*apt, "update"], env=quiet, stdout=subprocess.DEVNULL, check=False)
    done = subprocess.run(
        [*apt, "install", PACKAGE], env=quiet, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def make(folder: Path) -> None:
    """Makes `folder` a virtual environment with pip in it."""
    venv = [sys.executable, "-m", "venv", "--clear", str(folder)]
    if has_module("venv") and not has_module("ensurepip") and has_module("pip"):
        subprocess.run([*venv, "--without-pip"], check=True)
        python = str(folder / "bin" / "python")
        into = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "pip"]
        if subprocess.run(into, check=False).returncode == 0:
            return
    whole = has_module("venv") and has_module("ensurepip")
    if not whole and not install_with_apt():
        fail(
            f"{sys.executable} cannot make a virtual environment (no ensurepip)",
            f"install it first, on Debian and Ubuntu: apt-get install {PACKAGE}",
        )
    subprocess.run(venv, check=True)


def main() -> None:
    """Checks the version, then makes the environment of the first argument."""
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:3])
        wanted = ".".join(str(part) for part in OLDEST)
        fail(
            f"{sys.executable} is Python {found}; Allotment needs {wanted} or later",
            "name another one: make PYTHON=python3.12 ...",
        )
    make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
