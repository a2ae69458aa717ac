# SPDX-License-Identifier: Apache-2.0
"""TLS certificates of the servers: issue, rotate, reload."""
