# SPDX-License-Identifier: Apache-2.0
"""What the kubelet itself says: its gRPC services, and its record of who has which devices."""
