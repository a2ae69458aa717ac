# SPDX-License-Identifier: Apache-2.0
"""Write *_pb2.py and .pyi beside the kubelet's .proto files.

The compiler is the oldest that is to be supported: what it writes runs with its own protobuf and
all later ones, and what a newer one writes does not run with older ones. It has an environment of
its own in build/, because it wants older packages than the rest.

Each file names a digest of its .proto and of its own text: a change of either shows without the
compiler, which takes half a minute to be had.

Usage: python tools/generate_protos.py [--check]

Exit codes: 0 done, or nothing differs; 1 something differs; 3 the compiler cannot be had.
"""

from __future__ import annotations

import argparse
import hashlib
import re
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
MARK = re.compile(r"# Written by tools/generate_protos\.py, digest (\w+)\.\n")


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
            text = _headed(path, _proto_of(target))
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


def changed(root: Path, files: str) -> list[Path]:
    """Return what is not as it was written of the .proto that is there, by the digests."""
    found = []
    for proto in root.glob(files):
        for suffix in (".py", ".pyi"):
            path = proto.with_name(f"{proto.stem}_pb2{suffix}")
            text = path.read_text("utf-8") if path.exists() else ""
            mark = MARK.search(text)
            if mark is None or mark[1] != _digest(proto, MARK.sub("", text)):
                found.append(path)
    return sorted(found)


def _proto_of(target: Path) -> Path:
    return target.with_name(target.stem.removesuffix("_pb2") + ".proto")


def _digest(proto: Path, text: str) -> str:
    words = (VERSION, proto.read_text("utf-8"), text)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _headed(path: Path, proto: Path) -> str:
    """Return what was written, and who wrote it of what."""
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    text = path.read_text("utf-8")
    if path.suffix == ".pyi":
        # The compiler's `Mapping` has no types.
        text = '# mypy: disable-error-code="type-arg"\n' + text
    mark = f"# Written by tools/generate_protos.py, digest {_digest(proto, licence + text)}.\n"
    return licence + mark + text


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
