# SPDX-License-Identifier: Apache-2.0
"""Threads that read the first documents of a type at once, in a process that may crash."""

import subprocess
import sys

import pytest

RACE = """\
import sys, threading
import msgspec
from allotment.model.structs import prepared

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = msgspec.defstruct(f"Inner{number}", [(f"a{each}", int) for each in range(20)])
    kind = msgspec.defstruct(f"Outer{number}", [(f"b{each}", inner) for each in range(20)])
    data = msgspec.json.encode({f"b{each}": {f"a{n}": 1 for n in range(20)} for each in range(20)})
    begin = threading.Barrier(8)

    def read():
        begin.wait()
        msgspec.json.decode(data, type=PREPARED(kind))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_threads_may_read_the_first_documents_of_a_type_at_once() -> None:
    code = RACE.replace("PREPARED", "prepared")
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


@pytest.mark.thorough
def test_without_it_they_would_end_the_process() -> None:
    """If this fails, msgspec no longer needs `prepared`."""
    code = RACE.replace("PREPARED(kind)", "kind")
    ends = [subprocess.run([sys.executable, "-c", code], check=False) for _ in range(20)]
    assert any(each.returncode == -11 for each in ends)
