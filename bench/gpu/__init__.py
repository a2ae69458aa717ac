# SPDX-License-Identifier: Apache-2.0
"""What needs a real NVIDIA GPU: run.py does all of it."""
