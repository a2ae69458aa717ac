# SPDX-License-Identifier: Apache-2.0
"""Write src/allotment/ledger/layout.py from native/ledger.h, by asking a C compiler.

Usage: python tools/generate_ledger_layout.py [--check] [--cc CC]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "allotment" / "ledger" / "layout.py"

CONSTANTS = (
    "ALLOT_POLICY_MAGIC",
    "ALLOT_USAGE_MAGIC",
    "ALLOT_LEDGER_VERSION",
    "ALLOT_MAX_DEVICES",
    "ALLOT_MAX_SLOTS",
    "ALLOT_UUID_BYTES",
    "ALLOT_NAME_BYTES",
    "ALLOT_SLOT_FREE",
    "ALLOT_SLOT_TAKEN",
    "ALLOT_SLOT_LOCK_BASE",
)
STRUCTS = {
    "allot_device_policy": ("uuid", "memory_limit", "context_bytes"),
    "allot_policy": (
        "magic",
        "version",
        "device_count",
        "generation",
        "share_id",
        "share_name",
        "devices",
    ),
    "allot_slot_device": (
        "part.intents",
        "part.operation",
        "part.committed",
        "context",
        "peak",
    ),
    "allot_slot": (
        "state",
        "pid",
        "start_time",
        "attaches",
        "refusals",
        "command",
        "devices",
    ),
    "allot_usage_device": ("total.value", "total.last", "peak", "refusals"),
    "allot_usage": ("magic", "version", "slot_count", "high_slot", "devices", "slots"),
}

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Where the fields of native/ledger.h lie, in bytes.

Written by tools/generate_ledger_layout.py; a test compares it with the header.
"""

from typing import Final

'''


def _program() -> str:
    lines = ["#include <stdio.h>", '#include "ledger.h"', "int main(void) {"]
    for name in CONSTANTS:
        short = name.removeprefix("ALLOT_")
        lines.append(f'  printf("{short}: Final = %llu\\n", (unsigned long long){name});')
    for struct, fields in STRUCTS.items():
        short = struct.removeprefix("allot_").upper()
        lines.append(f'  printf("\\n{short}_SIZE: Final = %zu\\n", sizeof({struct}));')
        for field in fields:
            label = f"{short}_{field.replace('.', '_').upper()}_AT"
            lines.append(f'  printf("{label}: Final = %zu\\n", offsetof({struct}, {field}));')
    lines.append("  return 0;\n}")
    return "\n".join(lines)


def generate(compiler: list[str]) -> str:
    """Return the text of layout.py."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "layout.c")
        source.write_text(_program())
        binary = Path(folder, "layout")
        command = [
            *compiler,
            "-std=c11",
            "-I",
            str(ROOT / "native"),
            str(source),
            "-o",
            str(binary),
        ]
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
