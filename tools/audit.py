# SPDX-License-Identifier: Apache-2.0
"""Looks for known vulnerabilities in the pinned versions: `python tools/audit.py`.

pip-audit asks OSV about each line of constraints.txt. Without an answer this fails: a check that
did not run is not a check that passed. `AUDIT=offline` leaves it out, and prints that.
"""

import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ServiceError", "ProxyError")


def main() -> int:
    """Returns pip-audit's status; 2 where the service gave no answer."""
    mode = os.environ.get("AUDIT", "online")
    if mode not in {"online", "offline"}:
        sys.exit(f"error: AUDIT={mode} is neither online nor offline")
    if mode == "offline":
        print("audit: NOT RUN, because AUDIT=offline: no advisory was looked at")
        return 0
    command = ["-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [sys.executable, *command, "--strict", "--vulnerability-service", "osv"],
        capture_output=True,
        text=True,
        check=False,
    )
    reason = done.stderr.strip().rpartition("\n")[2]
    if done.returncode and any(name in reason for name in UNREACHABLE):
        print(f"audit: FAILED, because the advisory service gave no answer: {reason}")
        print("\nhint: run it where the OSV service can be reached; AUDIT=offline leaves it out")
        return 2
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
