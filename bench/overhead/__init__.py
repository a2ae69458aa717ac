# SPDX-License-Identifier: Apache-2.0
"""What a share costs a program, and how exact its limit is, beside the bare driver."""
