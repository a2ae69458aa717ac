# SPDX-License-Identifier: Apache-2.0
"""Write src/allotment/ledger/{layout,lease_layout}.py from native/{ledger,lease}.h.

A C compiler is asked for every size and offset.

Usage: python tools/generate_ledger_layout.py [--check] [--cc CC]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "allotment" / "ledger"


@dataclass(frozen=True, slots=True)
class Layout:
    """One header, what of it Python needs, and the module that gets it."""

    target: Path
    header: str
    constants: tuple[str, ...]
    structs: Mapping[str, tuple[str, ...]]


LEDGER = Layout(
    FOLDER / "layout.py",
    "ledger.h",
    (
        "ALLOT_POLICY_MAGIC",
        "ALLOT_USAGE_MAGIC",
        "ALLOT_LEDGER_VERSION",
        "ALLOT_MAX_DEVICES",
        "ALLOT_MAX_SLOTS",
        "ALLOT_UUID_BYTES",
        "ALLOT_NAME_BYTES",
        "ALLOT_SLOT_FREE",
        "ALLOT_SLOT_TAKEN",
        "ALLOT_SLOT_LEAVING",
        "ALLOT_SLOT_LOCK_BASE",
        "ALLOT_DEVICE_OVERSUBSCRIBED",
        "ALLOT_DEVICE_MPS",
        "ALLOT_WAIT_BUCKETS",
        "ALLOT_WAIT_FIRST_NS",
    ),
    {
        "allot_device_policy": (
            "uuid",
            "memory_limit",
            "context_bytes",
            "seat_serial",
            "seat",
            "flags",
        ),
        "allot_policy": (
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
            "refusals",
            "command",
            "gpu_ns",
            "held_ns",
            "throttled",
            "movable",
            "devices",
        ),
        "allot_usage_device": (
            "total.value",
            "total.last",
            "peak",
            "refusals",
            "gpu_ns",
            "copy_ns",
            "held_ns",
            "throttled",
            "moved_bytes",
            "host_bytes",
            "lease_waits",
            "lease_wait_ns",
            "launches",
        ),
        "allot_usage": ("version", "high_slot", "devices", "slots"),
    },
)
LEASES = Layout(
    FOLDER / "lease_layout.py",
    "lease.h",
    (
        "ALLOT_CONTRACT_MAGIC",
        "ALLOT_SEAT_MAGIC",
        "ALLOT_CONTRACT_VERSION",
        "ALLOT_SEAT_VERSION",
        "ALLOT_SEATS",
        "ALLOT_SEAT_UNBOOKED",
        "ALLOT_PLACES",
        "ALLOT_OWN_PLACES",
        "ALLOT_WHOLE",
        "ALLOT_TERMS_TAKEN",
        "ALLOT_TERMS_GOVERNED",
        "ALLOT_TERMS_SUSPENDED",
        "ALLOT_TERMS_OVERSUBSCRIBED",
        "ALLOT_PLACE_HOLDING",
    ),
    {
        "allot_contract_seat": ("terms", "serial", "share_id"),
        "allot_contract": ("version", "governed", "generation", "uuid", "seats"),
        "allot_seat_state": ("serial", "used_ns", "borrowed_ns", "leases", "evictions"),
        "allot_seat_facts": (
            "root",
            "now_ns",
            "account",
            "epoch",
            "granted_ns",
            "expires_ns",
            "holder_seat",
            "taken",
            "waiting",
            "holding",
        ),
        "allot_place_state": ("state",),
        "allot_lent": ("serial", "lent_ns"),
        "allot_seat_buffer": ("lent", "state"),
        "allot_place_head": ("busy", "beat_ns", "running_ns", "charged_ns"),
        "allot_leases_file": ("version", "root", "distrusted", "heads", "buffers"),
    },
)

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Where the fields of native/{header} lie, in bytes.

Written by tools/generate_ledger_layout.py; a test compares it with the header.
"""

from typing import Final

'''


def _program(layout: Layout) -> str:
    lines = ["#include <stdio.h>", "#include <stddef.h>", f'#include "{layout.header}"']
    lines.append("int main(void) {")
    for name in layout.constants:
        short = name.removeprefix("ALLOT_")
        lines.append(f'  printf("{short}: Final = %llu\\n", (unsigned long long){name});')
    for struct, fields in layout.structs.items():
        short = struct.removeprefix("allot_").upper()
        lines.append(f'  printf("\\n{short}_SIZE: Final = %zu\\n", sizeof({struct}));')
        for field in fields:
            label = f"{short}_{field.replace('.', '_').upper()}_AT"
            lines.append(f'  printf("{label}: Final = %zu\\n", offsetof({struct}, {field}));')
    lines.append("  return 0;\n}")
    return "\n".join(lines)


def generate(layout: Layout, compiler: list[str]) -> str:
    """Return the text of a layout's module."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "layout.c")
        source.write_text(_program(layout))
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
        told = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
        return HEAD.format(header=layout.header) + told


def main() -> int:
    """Write or compare; 1 when a committed file is not what its header says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    arguments = parser.parse_args()
    compiler = shlex.split(arguments.cc)
    texts = {layout.target: generate(layout, compiler) for layout in (LEDGER, LEASES)}
    if arguments.check:
        return 0 if all(path.read_text() == text for path, text in texts.items()) else 1
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
