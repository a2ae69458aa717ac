# SPDX-License-Identifier: Apache-2.0
"""A hostile program of a share: `turns_forger.py truncate|garbage|steal|future`.

It does so to its share's own file of turns, again and again, and never computes.
"""

import os
import struct
import sys
import time
from pathlib import Path

from allotment.ledger import lease_layout as at


def facts(serial: int, seat: int, *, epoch: int, root: int) -> bytes:
    """What a seat publishes that has the lease."""
    data = bytearray(at.SEAT_FACTS_SIZE)
    now = time.monotonic_ns()
    for word, value in (
        (at.SEAT_FACTS_ROOT_AT, root),
        (at.SEAT_FACTS_NOW_NS_AT, now),
        (at.SEAT_FACTS_ACCOUNT_AT + at.SEAT_STATE_SERIAL_AT, serial),
        (at.SEAT_FACTS_EPOCH_AT, epoch),
        (at.SEAT_FACTS_GRANTED_NS_AT, now),
        (at.SEAT_FACTS_EXPIRES_NS_AT, now + 10**9),
    ):
        struct.pack_into("<Q", data, word, value)
    struct.pack_into("<i", data, at.SEAT_FACTS_HOLDER_SEAT_AT, seat)
    struct.pack_into("<I", data, at.SEAT_FACTS_TAKEN_AT, 1)
    data[at.SEAT_FACTS_HOLDING_AT + at.PLACE_STATE_STATE_AT] = at.PLACE_HOLDING
    return bytes(data)


def forge(path: Path, serial: int, seat: int, *, ahead_ns: int) -> None:
    """Say that this share has the lease, and lives."""
    version = 1
    with path.open("r+b", buffering=0) as file:
        while True:
            version += 1
            now = time.monotonic_ns()
            root = version << 33 | version % 2 << 16 | 1
            file.seek(at.LEASES_FILE_BUFFERS_AT + version % 2 * at.SEAT_BUFFER_SIZE)
            file.write(facts(serial, seat, epoch=now + ahead_ns, root=root))
            for word in (at.PLACE_HEAD_BEAT_NS_AT, at.PLACE_HEAD_RUNNING_NS_AT):
                file.seek(at.LEASES_FILE_HEADS_AT + word)
                file.write(struct.pack("<Q", now))
            file.seek(at.LEASES_FILE_ROOT_AT)
            file.write(struct.pack("<Q", root))
            time.sleep(0.0005)


def main(how: str) -> None:
    share = Path(os.environ["ALLOTMENT_SHARE"])
    path = share / "seat-0"
    size = path.stat().st_size
    if how in {"steal", "future"}:
        contract = (share / "contract-0").read_bytes()
        for seat in range(at.SEATS):
            one = at.CONTRACT_SEATS_AT + seat * at.CONTRACT_SEAT_SIZE
            (serial,) = struct.unpack_from("<Q", contract, one + at.CONTRACT_SEAT_SERIAL_AT)
            published = share / "seats-0" / str(serial)
            if published.exists() and published.samefile(path):
                forge(path, serial, seat, ahead_ns=2**62 if how == "future" else 0)
    while True:
        if how == "truncate":
            os.truncate(path, 0)
            os.truncate(path, size)
        else:
            path.write_bytes(os.urandom(1 << 20))


main(sys.argv[1])
