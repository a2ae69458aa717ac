# SPDX-License-Identifier: Apache-2.0
"""What the page costs its server, and how soon a browser shows it."""
