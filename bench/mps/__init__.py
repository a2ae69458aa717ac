# SPDX-License-Identifier: Apache-2.0
"""What MPS brings beside time slicing, and how soon a killed daemon is replaced."""
