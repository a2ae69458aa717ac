# SPDX-License-Identifier: Apache-2.0
"""Which MIG devices are nobody's yet: those that Allotment made are their shares'.

A GPU may have slices of both kinds. What was cut by whoever configures the node is offered to the
kubelet; what a share had cut for itself, or is kept warm for the next one, never is: the kubelet
would give it to somebody else.
"""

from collections.abc import Sequence
from pathlib import Path

from allotment.model.devices import Device
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import is_of

__all__ = ["without_own"]


def without_own(folder: Path, slices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the MIG devices that have no record below `folder`; reads files.

    Raises `StateError` where the records cannot be listed.
    """
    gpus = {each.slice_of.gpu for each in slices if each.slice_of is not None}
    records = [record for gpu in gpus for record in Journal(folder / gpu).read().records]
    return tuple(each for each in slices if not any(is_of(one, each) for one in records))
