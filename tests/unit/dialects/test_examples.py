# SPDX-License-Identifier: Apache-2.0
"""Each file of examples/dialects and examples/mig asks natively for what its first lines name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_pods import load_settings

from allotment.dialects.foreign.kubeshare import KIND, pod_of_sharepod
from allotment.dialects.foreign.settings import foreign_dialects
from allotment.dialects.foreign.translate import applied, translate, wanted_of, written
from allotment.model.clusters import WantedContainer
from allotment.model.compute import Compute
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import ModelRule

GI = 1 << 30
MI = 1 << 20
SMALLEST = 79 * GI
"""A GPU on which every example has room: one that the tests simulate."""

DIALECTS = foreign_dialects()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What an example asks for, of each of its GPUs. Bytes, or a part of the GPU."""

    dialect: str
    container: str
    memory: int | Fraction
    count: int = 1
    compute: Compute = Compute()  # noqa: RUF009 - frozen
    model: str = ""


def percent(guarantee: int, ceiling: int) -> Compute:
    return Compute(guarantee * 100, ceiling * 100, is_governed=True)


SHARES = {
    "allotment": Share(dialect="", container="train", memory=4 * GI, compute=percent(30, 80)),
    "hami": Share(
        dialect="hami",
        container="ubuntu-container",
        memory=3000 * MI,
        count=2,
        compute=percent(30, 100),
    ),
    "volcano": Share(
        dialect="volcano",
        container="cuda-container",
        memory=3000 * MI,
        count=2,
        compute=percent(50, 100),
    ),
    "volcano-gpushare": Share(
        dialect="volcano-gpushare", container="cuda-container", memory=1024 * MI
    ),
    "aliyun": Share(dialect="aliyun", container="binpack-1", memory=3 * GI),
    "ack": Share(dialect="aliyun", container="tensorflow-mnist-multigpu", memory=4 * GI, count=2),
    "ack-core": Share(
        dialect="aliyun", container="cuda-sample", memory=2 * GI, compute=percent(30, 30)
    ),
    "tencent": Share(
        dialect="tencent", container="nvidia", memory=7680 * MI, compute=percent(50, 50)
    ),
    "qgpu": Share(dialect="qgpu", container="qgpu", memory=5 * GI, compute=percent(30, 100)),
    "elastic-gpu": Share(dialect="elastic-gpu", container="cuda", memory=2048 * MI),
    "kubeshare": Share(dialect="kubeshare", container="cuda", memory=GI, compute=percent(50, 100)),
    "kubeshare-sharepod": Share(
        dialect="kubeshare", container="cuda", memory=GI, compute=percent(50, 100)
    ),
    "kubeshare-2": Share(
        dialect="kubeshare-2",
        container="pytorch",
        memory=Fraction(1, 2),
        compute=percent(50, 100),
        model="NVIDIA-A100-SXM4-80GB",
    ),
    "kai": Share(dialect="kai", container="gpu-workload", memory=Fraction(1, 2)),
    "kai-memory": Share(dialect="kai", container="gpu-workload", memory=2000 * MI),
    "kai-container": Share(dialect="kai", container="gpu-workload", memory=Fraction(1, 2)),
    "nvfractions": Share(dialect="kai", container="gpu-workload", memory=8192 * MI),
}
LEFT = ("deepomatic", "nvidia")
"""What the kubelet gives, as it is."""


def test_every_example_is_here(root: Path) -> None:
    assert {each.stem for each in folder(root).glob("*.yaml")} == {*SHARES, *LEFT}


def test_every_dialect_has_an_example() -> None:
    names = {each.name for each in DIALECTS}
    assert names == {each.dialect for each in SHARES.values() if each.dialect} | {*LEFT}


@pytest.mark.parametrize("name", SHARES)
def test_an_example_asks_for_the_share_that_it_names(root: Path, name: str) -> None:
    expected = SHARES[name]
    (found,) = asked(root, name, dialect=expected.dialect)
    request = found.request
    part = expected.memory if isinstance(expected.memory, Fraction) else None
    assert found.name == expected.container
    assert (request.count, request.compute) == (expected.count, expected.compute)
    assert request.memory.part == part
    assert request.memory.size_bytes == (None if part else expected.memory)
    models = (ModelRule(expected.model, is_exact=True),) if expected.model else ()
    assert request.constraints.models == models


@pytest.mark.parametrize("name", LEFT)
def test_an_example_is_left_as_it_is(root: Path, name: str) -> None:
    assert translate(foreign(document(root, name)), DIALECTS) is None


@pytest.mark.parametrize("name", SHARES)
def test_an_example_can_run_in_its_share(root: Path, name: str) -> None:
    """CUDA's context of a process is 420 MiB on the GPU that the tests simulate."""
    share = SHARES[name]
    size = share.memory if isinstance(share.memory, int) else int(share.memory * SMALLEST)
    (main,) = (
        each
        for each in document(root, name)["spec"]["containers"]
        if each["name"] == share.container
    )
    command = " ".join(main["command"])
    assert command == "allot burn --memory 512Mi --seconds 0 -o json"
    assert (512 + 420) * MI <= size <= SMALLEST


@pytest.mark.parametrize("name", [*SHARES, *LEFT])
def test_an_example_says_what_it_is(root: Path, name: str) -> None:
    text = (folder(root) / f"{name}.yaml").read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n# ")
    assert "restartPolicy: Never" in text


def folder(root: Path) -> Path:
    return root / "examples" / "dialects"


def document(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder(root) / f"{name}.yaml").read_text())
    return pod_of_sharepod(found) if found["kind"] == KIND else found


def asked(root: Path, name: str, *, dialect: str) -> tuple[WantedContainer, ...]:
    pod = foreign(document(root, name))
    found = translate(pod, DIALECTS)
    assert (found.dialect if found else "") == dialect
    return wanted_of(applied(pod, written(pod, found)) if found else pod)


def foreign(pod: Mapping[str, Any]) -> ForeignPod:
    """The pod as a dialect reads it."""
    metadata, spec = pod["metadata"], pod["spec"]
    return ForeignPod(
        namespace="team",
        name=metadata["name"],
        labels=metadata.get("labels", {}),
        annotations=metadata.get("annotations", {}),
        containers=tuple(containers(spec)),
        scheduler=spec.get("schedulerName", ""),
        node=spec.get("nodeName", ""),
        node_selector=spec.get("nodeSelector", {}),
    )


def containers(spec: Mapping[str, Any]) -> Iterator[ForeignContainer]:
    for field, kind in (("initContainers", ContainerKind.INIT), ("containers", "regular")):
        for each in spec.get(field, ()):
            resources = each.get("resources", {})
            yield ForeignContainer(
                name=each["name"],
                kind=ContainerKind(kind),
                limits={key: str(text) for key, text in resources.get("limits", {}).items()},
                requests={key: str(text) for key, text in resources.get("requests", {}).items()},
            )


# ---- slices --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """What an example of MIG asks for."""

    dialect: str = ""
    modes: tuple[str, ...] = ("mig",)
    profile: str = ""
    memory: int | None = None
    count: int = 1


SLICES = {
    "allotment": Slices(profile="1g.10gb"),
    "open": Slices(modes=("mig", "soft"), memory=8 * GI),
    "nvidia": Slices(dialect="nvidia", profile="1g.10gb"),
    "hami": Slices(dialect="hami", memory=8000 * MI, count=2),
    "volcano": Slices(dialect="volcano", memory=8000 * MI),
}


def test_every_example_of_mig_is_here(root: Path) -> None:
    there = root / "examples" / "mig"
    assert {each.stem for each in there.glob("*.yaml")} == SLICES.keys()
    readme = (there / "README.md").read_text()
    assert all(f"`{name}.yaml`" in readme for name in SLICES)


@pytest.mark.parametrize("name", SLICES)
def test_an_example_of_mig_asks_for_its_slices(root: Path, name: str) -> None:
    expected = SLICES[name]
    text = (root / "examples" / "mig" / f"{name}.yaml").read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n# ")
    pod = foreign(yaml.safe_load(text))
    found = translate(pod, foreign_dialects(load_settings("nvidia: {mig: slices}")))
    assert (found.dialect if found else "") == expected.dialect
    (only,) = wanted_of(applied(pod, written(pod, found)) if found else pod)
    request = only.request
    assert (request.mode, *request.other_modes) == expected.modes
    assert (request.mig_profile, request.count) == (expected.profile, expected.count)
    if expected.memory is not None:
        assert request.memory.size_bytes == expected.memory
