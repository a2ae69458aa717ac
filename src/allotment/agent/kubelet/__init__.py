# SPDX-License-Identifier: Apache-2.0
"""The kubelet's own interfaces: its gRPC services and its device checkpoint."""
