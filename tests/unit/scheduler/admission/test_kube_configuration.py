# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler asks about: pods with Allotment's own resource, and nobody else's."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.settings import foreign_dialects
from allotment.dialects.foreign.translate import applied, translate, written
from allotment.model.errors import UsageError
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.scheduler.admission.manifests import kube_configuration
from allotment.scheduler.admission.rules import keys_of

DIALECTS = foreign_dialects()
FOREIGN = sorted(
    {each for dialect in DIALECTS for each in keys_of(dialect).resources} - {"nvidia.com/gpu"}
)
LIMITS = st.dictionaries(
    st.sampled_from([each for each in FOREIGN if "*" not in each]),
    st.sampled_from(["0", "1", "2", "30", "100", "4Gi"]),
    max_size=3,
)


def test_no_other_system_s_pods_are_asked_about_or_bound() -> None:
    """kube-scheduler lets the first extender bind that has one of a pod's resources."""
    text = kube_configuration(host="here", port=1, tls={}, scheduler="ours", has_plain_pods=True)
    extender, plain = yaml.safe_load(text)["extenders"]
    assert extender["bindVerb"] == "bind"
    assert "bindVerb" not in plain
    assert extender["managedResources"] == [
        {"name": "allotment.dev/gpu", "ignoredByScheduler": False}
    ]


@given(st.lists(LIMITS, min_size=1, max_size=3))
def test_nothing_that_no_node_offers_is_left_on_a_pod(limits: list[dict[str, str]]) -> None:
    """So nothing has to be ignored. A zero is no request to kube-scheduler."""
    subject = ForeignPod(
        namespace="team",
        name="p",
        containers=tuple(
            ForeignContainer(name=f"c{place}", limits=its, requests=its)
            for place, its in enumerate(limits)
        ),
    )
    try:
        found = translate(subject, DIALECTS)
        after = applied(subject, written(subject, found)) if found is not None else None
    except UsageError:
        return
    for container in after.containers if after is not None else ():
        asked = {each for each, text in container.limits.items() if text != "0"}
        assert not asked & {*FOREIGN}
