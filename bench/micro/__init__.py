# SPDX-License-Identifier: Apache-2.0
"""Small Python calls, timed by pyperf."""
