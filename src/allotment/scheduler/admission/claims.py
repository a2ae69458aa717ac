# SPDX-License-Identifier: Apache-2.0
"""The webhook of claims: refuses wrong parameters when they are written, not when a pod starts.

It reads them as the node's agent does, which reads them again: this webhook fails open. What only
an allocation shows, such as the type of the device, is left to the agent.

It also refuses a class for the resources of Allotment's device plugin: kube-scheduler would make
claims for pods that Allotment's scheduler places, wherever a node's plugin is away.
"""

from typing import Final

from allotment.dialects.own.allotment import RESOURCES
from allotment.dialects.own.resource_claims import DRIVER, in_one, read_parameters
from allotment.kube.resource_claims import written_object
from allotment.model.errors import UsageError
from allotment.scheduler.admission.review import Reply, ReviewAnswer, ReviewRequest, replied

PATH: Final = "/webhook/claims"
"""The API server posts reviews to this path."""
GROUP: Final = "resource.k8s.io"
KINDS: Final = {
    "resourceclaims": "ResourceClaim",
    "resourceclaimtemplates": "ResourceClaimTemplate",
    "deviceclasses": "DeviceClass",
}
"""By resource: the objects that have configurations of drivers."""
CONDITION: Final = (
    # A stored object may be labelled or deleted, whatever is in it.
    "(request.operation == 'CREATE' || object.spec != oldObject.spec)"
    " && ([object.spec.?config, object.spec.?devices.?config, object.spec.?spec.?devices.?config]"
    ".exists(c, c.orValue([])"
    f".exists(each, each.?opaque.?driver.orValue('') == '{DRIVER}'))"
    f" || object.spec.?extendedResourceName.orValue('') in {[*RESOURCES]})"
)
"""True for a new specification with parameters for Allotment's driver, or for its resources."""

_INVALID = 422


def review(body: bytes) -> Reply:
    return replied(body, _reviewed)


def _reviewed(request: ReviewRequest) -> ReviewAnswer:
    kind = KINDS.get(request.resource.resource)
    if kind is None or request.resource.group != GROUP or request.sub_resource:
        return ReviewAnswer()
    name = request.name
    problems = []
    try:
        found = written_object(request.object, driver=DRIVER)
        name = found.name
        if found.extended_resource in RESOURCES:
            problems.append(_not_for_classes(found.extended_resource, name))
        for each in found.parameters:
            try:
                read_parameters(each)
            except UsageError as error:
                problems.append(error)
    except UsageError as error:
        problems.append(error)
    if not problems:
        return ReviewAnswer()
    shown = f"{request.namespace}/{name}" if request.namespace else name
    text = f"{kind} {shown}: {in_one(problems).one_line()}"
    return ReviewAnswer(refusal=text, code=_INVALID, reason="Invalid")


def _not_for_classes(resource: str, name: str) -> UsageError:
    return UsageError(
        f"spec.extendedResourceName: {resource} is counted by the device plugin and by Allotment's"
        " scheduler, and a claim for it would not have the amounts that its pods name",
        hint=f"leave it out: pods get a device by `deviceclass.resource.kubernetes.io/{name}: 1`",
    )
