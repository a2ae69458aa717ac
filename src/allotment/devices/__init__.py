# SPDX-License-Identifier: Apache-2.0
"""A machine's GPUs, real or simulated, and their current state.

`sources` has values and protocols, `nvml` reads NVML (real or simulated), `simulated` creates and
reads simulated machines, `faults` breaks them on demand. Imports are cheap: pynvml and yaml load on
first use. Nothing here depends on shares.
"""
