# SPDX-License-Identifier: Apache-2.0
"""How well shares of GPU time hold, beside the same programs without limits."""
