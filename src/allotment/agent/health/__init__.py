# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs can be used: what they report, what is done about it, and when it is over."""
