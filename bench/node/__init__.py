# SPDX-License-Identifier: Apache-2.0
"""What the node agent costs pods and the node, on a real kubelet with simulated GPUs."""
