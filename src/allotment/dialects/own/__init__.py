# SPDX-License-Identifier: Apache-2.0
"""The dialects that nodes and schedulers read: Allotment's own and NVIDIA's."""
