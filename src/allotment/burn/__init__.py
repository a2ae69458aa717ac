# SPDX-License-Identifier: Apache-2.0
"""A GPU workload that runs alike on real and simulated GPUs, and reports its result.

Uses only `libcuda.so.1`, so that it sees what any CUDA program would see. Must not know shares,
ledgers or simulated machines: its report is evidence only because the driver is its only source.
"""
