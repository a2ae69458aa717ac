# SPDX-License-Identifier: Apache-2.0
"""What the kubelet is told of this node's resources, and what it is answered."""
