# SPDX-License-Identifier: Apache-2.0
"""How full clusters get, and how long a decision takes."""
