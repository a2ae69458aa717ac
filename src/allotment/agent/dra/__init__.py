# SPDX-License-Identifier: Apache-2.0
"""The driver `gpu.allotment.dev` of Dynamic Resource Allocation (docs/designs/dra.md)."""
