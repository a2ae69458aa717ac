# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes on this one machine, for tests: control plane, kubelet, simulated GPUs.

Nothing here is a stand-in except the GPUs. The binaries are built from Go modules (`build`), the
images are put together from what the machine has (`images`), and everything runs in namespaces of
its own (`sandbox`), so that the machine's folders, network and processes stay as they were and
several clusters run side by side.

    python -m testbed up --simulated a100-80gb:2
"""
