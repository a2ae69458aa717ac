# SPDX-License-Identifier: Apache-2.0
"""Write *_pb2.py and .pyi beside the kubelet's .proto files.

The compiler is the oldest that is to be supported: what it writes runs with its own protobuf and
all later ones, and what a newer one writes does not run with older ones. It has an environment of
its own in build/, because it wants older packages than the rest.

Usage: python tools/generate_protos.py [--check]

Exit codes: 0 done, or nothing differs; 1 something differs; 3 the compiler cannot be had.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {ROOT / "src": "allotment/agent/kubelet/proto/*.proto"}
"""Import roots, with the files below them."""
VERSION = "1.71.2"
UNAVAILABLE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    check: bool = parser.parse_args(arguments).check
    try:
        compiler = _compiler(ROOT / "build" / f"protoc-{VERSION}")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"grpcio-tools {VERSION} cannot be had: {error}", file=sys.stderr)
        return UNAVAILABLE
    differing = sum(
        _generate(compiler, root, files, check=check) for root, files in SOURCES.items()
    )
    return int(check and differing > 0)


def _generate(compiler: Path, root: Path, files: str, *, check: bool) -> int:
    """Write or compare the messages below one import root; return how many files differ."""
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        _compile(compiler, root, files, made)
        for path in sorted(made.rglob("*_pb2.py*")):
            target = root / path.relative_to(made)
            text = _headed(path)
            if target.exists() and target.read_text("utf-8") == text:
                continue
            differing += 1
            print(f"{'differs' if check else 'writing'}: {target.relative_to(ROOT)}")
            if not check:
                target.write_text(text, "utf-8")
    return differing


def _compiler(folder: Path) -> Path:
    """Return the interpreter that has the compiler; made on first use."""
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*install, f"grpcio-tools=={VERSION}", "setuptools<81"], check=True)
        ready.touch()
    return python


def _headed(path: Path) -> str:
    """Return what was written, and who wrote it."""
    header = "# SPDX-License-Identifier: Apache-2.0\n# Written by tools/generate_protos.py.\n"
    if path.suffix == ".pyi":
        # The compiler's `Mapping` has no types.
        header += '# mypy: disable-error-code="type-arg"\n'
    return header + path.read_text("utf-8")


def _compile(python: Path, root: Path, files: str, into: Path) -> None:
    # Named by their whole path: Python keeps all messages of a process in one pool, by file name.
    names = [str(path.relative_to(root)) for path in sorted(root.glob(files))]
    subprocess.run(
        [
            str(python),
            "-W",
            "ignore",
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={root}",
            f"--python_out={into}",
            f"--pyi_out={into}",
            *names,
        ],
        check=True,
        cwd=root,
    )


if __name__ == "__main__":
    sys.exit(main())
