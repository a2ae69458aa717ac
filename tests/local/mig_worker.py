# SPDX-License-Identifier: Apache-2.0
"""A process that makes or removes a MIG slice, and may be ended at any step of it.

mig_worker.py MACHINE JOURNAL cut PROFILE START HOLDER
mig_worker.py MACHINE JOURNAL remove ID
"""

from __future__ import annotations

import sys
from pathlib import Path

from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.slices import Slices


def main(machine: str, journal: str, verb: str, *words: str) -> None:
    def work(device: MigDevice) -> str:
        known = Journal(Path(journal))
        slices = Slices(device.driver, known)
        if verb == "remove":
            holder = next(each.holder for each in known.read().records if each.id == words[0])
            slices.remove(words[0], after=holder)
            return words[0]
        name, start, holder = words
        with slices.cut(name, int(start), holder=holder) as made:
            return made.record.id

    with MigMachine(Path(machine)) as gpus:
        [(_, answer)] = gpus.ask(work, patience_s=30)
    if isinstance(answer, Exception):
        raise answer
    print(answer)  # noqa: T201 - for whoever started it


if __name__ == "__main__":
    main(*sys.argv[1:])
