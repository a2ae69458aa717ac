# SPDX-License-Identifier: Apache-2.0
"""Write src/allotment/devices/layout.py from native/simulated/machine.h, by asking a C compiler.

Names come from the header's text, offsets and types from the compiler. Run it after every change
of machine.h or of the engine's state.h.

Usage: python tools/generate_machine_layout.py [--check] [--cc CC]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = ROOT / "native" / "simulated"
TARGET = ROOT / "src" / "allotment" / "devices" / "layout.py"

CONSTANTS = (
    "ALLOT_MACHINE_MAGIC",
    "ALLOT_MACHINE_VERSION",
    "ALLOT_MACHINE_GPUS",
    "ALLOT_MACHINE_PROCESSES",
    "ALLOT_MIG_SLOTS",
    "ALLOT_MIG_PROFILES",
    "ALLOT_PROCESS_LOCK_BASE",
)
STRUCTS = {
    "allot_machine_description": "MACHINE",
    "allot_gpu_description": "GPU",
    "allot_machine_faults": "FAULTS",
    "allot_gpu_faults": "GPU_FAULTS",
    "allot_mig_profile": "MIG_PROFILE",
    "allot_gpu_mig": "GPU_MIG",
    "allot_gpu_instance": "GPU_INSTANCE",
    "allot_compute_instance": "COMPUTE_INSTANCE",
}
NOT_WRITTEN = {"spare"}

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Where the fields of native/simulated/machine.h lie: name, offset in bytes, `struct` format.

Written by tools/generate_machine_layout.py; a test compares it with the header.
"""

from typing import Final

'''

PROLOGUE = """\
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "simulated/machine.h"
#include "simulated/engine/state.h"
#define CODE(field) _Generic((field), \\
  uint32_t: "I", int32_t: "i", uint64_t: "Q", int64_t: "q", char *: "s", \\
  uint32_t *: "I", int32_t *: "i", uint64_t *: "Q", default: "")
#define UNIT(field) _Generic((field), \\
  uint32_t: 4, int32_t: 4, uint64_t: 8, int64_t: 8, char *: 1, \\
  uint32_t *: 4, int32_t *: 4, uint64_t *: 8, default: 1)
#define SHOW(type, field) do { \\
    type *p = 0; \\
    unsigned long long count = sizeof p->field / UNIT(p->field); \\
    const char *code = CODE(p->field); \\
    printf("    \\"" #field "\\": (%zu, \\"", offsetof(type, field)); \\
    if (!*code) code = "s"; \\
    if (count > 1) printf("%llu", count); \\
    printf("%s\\"),\\n", code); \\
  } while (0)
int main(void) {
"""


def fields(struct: str) -> list[str]:
    """Return the names of a structure's members, as machine.h has them."""
    text = re.sub(r"//.*", "", (SIMULATED / "machine.h").read_text())
    body = re.search(rf"typedef struct {struct} \{{(.*?)\n\}} {struct};", text, re.DOTALL)
    if body is None:
        raise SystemExit(f"machine.h has no struct {struct}")
    flat = re.sub(r"struct \{[^}]*\}", "struct", body[1])
    names = [
        re.sub(r"\[.*?\]", "", part).split()[-1]
        for declaration in flat.split(";")
        if declaration.strip()
        for part in declaration.split(",")
    ]
    return [name for name in names if name not in NOT_WRITTEN]


def _program() -> str:
    lines = [PROLOGUE]
    for name in CONSTANTS:
        short = name.removeprefix("ALLOT_")
        lines.append(f'  printf("{short}: Final = %llu\\n", (unsigned long long){name});')
    lines.append(
        '  printf("MACHINE_FILE_BYTES: Final = %llu\\n",'
        " (unsigned long long)ALLOT_MACHINE_FILE_BYTES);"
    )
    lines.append('  printf("MACHINE_RINGS_AT: Final = %zu\\n", offsetof(allot_machine, rings));')
    lines.append(f'  printf("STATE_LAYOUT: Final = \\"{state_layout()}\\"\\n");')
    lines.append('  printf("MIG_AT: Final = %zu\\n", offsetof(allot_machine, mig));')
    lines.append('  printf("FAULTS_AT: Final = %zu\\n", offsetof(allot_machine, faults));')
    for struct, short in STRUCTS.items():
        lines.append(f'  printf("\\n{short}_SIZE: Final = %zu\\n", sizeof({struct}));')
        lines.append(f'  printf("{short}_FIELDS: Final[dict[str, tuple[int, str]]] = {{\\n");')
        lines += [f"  SHOW({struct}, {name});" for name in fields(struct)]
        lines.append('  printf("}\\n");')
    lines.append("  return 0;\n}")
    return "\n".join(lines)


def state_layout() -> str:
    """Return a hash of both headers' declarations: a file of other ones must not be mapped."""
    text = "".join((SIMULATED / name).read_text() for name in ("machine.h", "engine/state.h"))
    words = re.sub(r"//.*", "", text).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def generate(compiler: list[str]) -> str:
    """Return the text of layout.py."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "layout.c")
        source.write_text(_program())
        binary = Path(folder, "layout")
        include = ["-I", str(ROOT / "native")]
        command = [*compiler, "-std=c11", "-D_GNU_SOURCE", *include, str(source), "-o", str(binary)]
        subprocess.run(command, check=True)
        return HEAD + subprocess.run([binary], check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Write or compare; 1 when the committed file is not what the header says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    arguments = parser.parse_args()
    text = generate(shlex.split(arguments.cc))
    if arguments.check:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
