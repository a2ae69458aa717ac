# SPDX-License-Identifier: Apache-2.0
"""What GPUs a machine has, real or simulated, and what goes on on them.

`sources` has the values and the protocols, `nvml` asks NVML (the real one, or the simulated one),
`simulated` makes and reads simulated machines, `faults` breaks them on demand. Importing any of
them is cheap: pynvml and yaml are loaded when first needed. Nothing here knows shares.
"""
