# SPDX-License-Identifier: Apache-2.0
"""Other systems' dialects, translated into Allotment's own when a pod is created."""
