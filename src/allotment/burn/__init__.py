# SPDX-License-Identifier: Apache-2.0
"""A workload that runs alike on real and simulated GPUs, and says what happened to it.

`allot burn` asks for memory by one of the driver's ways, runs kernels of a known duration, and
reports what it got, what the driver told it, how long the work took and which errors came. It
speaks to `libcuda.so.1` alone (no toolkit, no compiler), so that it sees exactly what any CUDA
program in its place would see.

This package must not know shares, ledgers or simulated machines: it is a tenant, and what it
reports is only worth something because it has no other source than the driver.
"""
