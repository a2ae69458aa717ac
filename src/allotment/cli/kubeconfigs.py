# SPDX-License-Identifier: Apache-2.0
"""Which kubeconfig is meant by people who name none: the one that their kubectl reads."""

import os
from pathlib import Path

__all__ = ["usual_kubeconfig"]


def usual_kubeconfig() -> Path | None:
    """Find what kubectl would read; None: as the pod that this is, or not at all.

    Of several files in `KUBECONFIG`, which kubectl merges, the first that is there.
    """
    named = [Path(each) for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    if named:
        return next((each for each in named if each.exists()), named[0])
    usual = Path.home() / ".kube" / "config"
    return usual if "KUBERNETES_SERVICE_HOST" not in os.environ and usual.exists() else None
