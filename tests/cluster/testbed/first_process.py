# SPDX-License-Identifier: Apache-2.0
"""The first process of a sandbox: lays out its folders, then reaps what is left to it.

Run by `sandbox` as a script in fresh namespaces, with the interpreter's own library alone:

    python3 -I first_process.py STATE_FOLDER HOSTNAME

As the namespace's process 1 it ends every other one when it ends: shims, pods, servers. Its mounts
go with it. What a Kubernetes node writes outside of its state folder lands in layers here, so that
the machine's /etc, /var/lib and /run are as before.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

# What the kubelet would set on the machine, for good. It reads them first: that these hold is all
# it wants (pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables, v1.36).
KERNEL_TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def lay_out(state: Path) -> None:
    """Makes this mount namespace a node's."""
    # What containers mount shows on this node and goes no further: the namespace was made private.
    mount("--make-rshared", "/")
    # Everything of a node that does not outlast a boot is here. As Debian and Ubuntu mount it: what
    # is to be run or mapped from it by a container has to be mounted there anew.
    mount("-t", "tmpfs", "-o", "mode=755,nosuid,nodev,noexec", "tmpfs", "/run")
    for folder in ("/etc", "/var/lib", "/var/log"):
        layers = Path("/run/testbed") / folder.strip("/").replace("/", "-")
        (layers / "upper").mkdir(parents=True)
        (layers / "work").mkdir()
        options = f"lowerdir={folder},upperdir={layers}/upper,workdir={layers}/work"
        mount("-t", "overlay", "-o", options, "overlay", folder)
    for folder in ("/etc/cdi", "/run/cdi", "/run/netns", "/etc/kubernetes"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not Path("/var/run").is_symlink():
        mount("--bind", "/run", "/var/run")
    # The kubelet's device plugin folder is compiled in, whatever its --root-dir. On the disk and
    # not in a layer: the kubelet measures it, and what containers said outlives the sandbox.
    for name, path in (("kubelet", "/var/lib/kubelet"), ("pod-logs", "/var/log/pods")):
        (state / name).mkdir(exist_ok=True)
        Path(path).mkdir(exist_ok=True)
        mount("--bind", str(state / name), path)
    for name, value in KERNEL_TUNABLES.items():
        if not Path("/proc/sys", name).exists():  # a kernel without key rings
            continue
        stand_in = Path("/run/testbed") / name.replace("/", ".")
        stand_in.write_text(f"{value}\n", encoding="ascii")
        mount("--bind", str(stand_in), f"/proc/sys/{name}")


def reap_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    state, hostname = Path(sys.argv[1]), sys.argv[2]
    socket.sethostname(hostname)
    lay_out(state)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    reap_for_ever()


if __name__ == "__main__":
    main()
