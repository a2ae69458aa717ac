# SPDX-License-Identifier: Apache-2.0
"""What all benches share: the registry, results, quantiles, tables, programs."""
