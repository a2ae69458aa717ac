# SPDX-License-Identifier: Apache-2.0
"""The device plugin API: this node's resources for the kubelet, and the answers to its calls."""
