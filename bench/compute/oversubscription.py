# SPDX-License-Identifier: Apache-2.0
"""Do two jobs that do not fit together run about as fast together as one after the other?"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms, simulated_rig
from bench.compute.scene import Part, play
from bench.compute.sizes import Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.results import Result

# A small memory, so that moving it takes a fraction of a second, as jobs take seconds here.
_MODEL = "t4[memory=3Gi]"
_PART = 0.95


def oversubscription(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure two jobs of 95 % of the memory each, oversubscribed, and one after the other."""
    sizes = Sizes.of(options)
    with simulated_rig(gpus=1, model=_MODEL, verbose=rig.verbose) as small:
        device = small.devices[0]
        # What two contexts leave: on a GPU of full size they are a hundredth of it.
        room = device.allottable_bytes - 2 * (device.context_bytes or 0)
        memory = int(room * _PART)
        job = small.program(
            "load",
            *kernel_words("2ms"),
            "--seconds",
            600,
            "--work-ms",
            sizes.job_ms,
            "--memory",
            memory,
        )
        started = time.monotonic()
        spans = [_alone(small, job) for _ in range(2)]
        serial = sum(spans)
        whole = time.monotonic() - started
        limit = memory + (device.context_bytes or 0) + (64 << 20)
        terms = Terms(compute="50:100", memory=str(limit), others=("--oversubscribe",))
        recording = play(
            small,
            [Part(command=job, terms=terms, name=f"job-{number}") for number in range(2)],
        )
        show(small, recording, recording.begun_ns, recording.ended_ns)
        ended = max(int(answer["ended_ns"]) for part in recording.answers for answer in part)
        together = (ended - recording.begun_ns) / 1e9
    yield Result(
        topic="oversubscribed",
        name="two jobs of 95 % of the memory each, together",
        beside=f"{serial:.2f} s one after the other",
        seen=f"{together:.2f} s",
        value=together / serial,
        unit="x",
        target=1.10,
        samples=1,
        method=f"{sizes.job_ms / 1000:.0f} s of 2ms kernels each, on {_MODEL}, 95 % of what "
        "their contexts leave, from their first launch to their last end; without limits one after "
        f"the other (with their starts {whole:.1f} s)",
    )


def _alone(small: Rig, job: list[str]) -> float:
    done = subprocess.run(
        job,
        env=small.bare(0),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return (int(answer["ended_ns"]) - int(answer["begun_ns"])) / 1e9
