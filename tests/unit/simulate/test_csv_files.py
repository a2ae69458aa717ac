# SPDX-License-Identifier: Apache-2.0
"""CSV files of traces: read as others write them, and refused with the line that is wrong."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.simulate.csv_files import (
    TraceNode,
    TracePod,
    TraceShape,
    nodes_text,
    pods_text,
    read_nodes,
    read_pods,
)

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn-0,64000,262144,2,P100\nn-1,96000,1024,0,\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time\n"
    "p-0,12000,16384,1,1000,,LS,Running,10,110.5,30\n"
    "p-1,6000,12288,1,460,V100M32|V100M16|V100M16,LS,Running,5,9,\n"
    "p-2,100,0,0,0,,BE,Pending,7,,\n"
)
FEW = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np-0,12000,16384,8,1000\n"


def file(folder: Path, text: str | bytes) -> Path:
    path = folder / "file.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_nodes(tmp_path: Path) -> None:
    first, second = read_nodes(file(tmp_path, NODES))
    assert first == TraceNode(
        name="n-0", cpu_milli=64000, memory_mib=262144, gpus=2, model="P100", gpu_memory_mib=None
    )
    assert (second.gpus, second.model) == (0, "")


def test_pods(tmp_path: Path) -> None:
    whole, part, none = read_pods(file(tmp_path, PODS))
    assert whole.shape == TraceShape(cpu_milli=12000, gpus=1, gpu_milli=1000)
    # From when it was placed, not from when it came.
    assert (whole.created_s, whole.duration_s) == (10, 80.5)
    assert part.shape.models == ("V100M16", "V100M32")
    assert part.duration_s == 4
    assert none.shape.size_milli == 0
    assert none.duration_s is None
    assert [each.line for each in (whole, part, none)] == [2, 3, 4]


@pytest.mark.parametrize(
    "text",
    [FEW, "\ufeff" + FEW, FEW.replace("\n", "\r\n"), FEW + "\n\n"],
    ids=["few columns", "with a mark", "of Windows", "with empty lines"],
)
def test_columns_may_be_missing(tmp_path: Path, text: str) -> None:
    (pod,) = read_pods(file(tmp_path, text))
    assert pod.shape.size_milli == 8000
    assert (pod.shape.models, pod.created_s, pod.duration_s) == ((), None, None)


def test_columns_may_be_in_any_order_and_more(tmp_path: Path) -> None:
    (node,) = read_nodes(
        file(tmp_path, "zone,gpu_memory_mib,gpu,sn,memory_mib,cpu_milli\na,16384,4,n,1,2\n")
    )
    assert (node.name, node.gpus, node.gpu_memory_mib, node.model) == ("n", 4, 16384, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no pods"),
        (PODS.splitlines()[0], "has no pods"),
        ("name,cpu,num_gpu,gpu_milli\n", "line 1: missing column cpu_milli"),
        (FEW.replace("num_gpu", "nun_gpu"), "is it 'nun_gpu'?"),
        (FEW.replace("memory_mib", "gpu_milli"), "line 1: column gpu_milli appears twice"),
        (FEW + "p-1,x,1,1,1\n", "line 3: cpu_milli is 'x'"),
        (FEW + "p-1,-5,1,1,1\n", "line 3: cpu_milli is '-5'"),
        (FEW + "p-1,1.5,1,1,1\n", "line 3: cpu_milli is '1.5'"),
        (FEW + "p-1,٣,1,1,1\n", "line 3: cpu_milli is '٣'"),
        (FEW + f"p-1,{'9' * 5000},1,1,1\n", "line 3: cpu_milli is '999"),
        (FEW + "p-1,1,1,65,1000\n", "line 3: num_gpu is '65'"),
        (FEW + "p-1,1,1,1,1001\n", "line 3: gpu_milli is '1001'"),
        (FEW + "p-1,1,1,1,0\n", "requests 1 GPUs with gpu_milli 0"),
        (FEW + "p-1,1,1,0,460\n", "gpu_milli 460 of 0 GPUs"),
        (FEW + ",1,1,1,1\n", "line 3: name is empty"),
        (FEW + "p-0,1,1,1,1\n", "line 3: name 'p-0' repeats line 2"),
        (FEW + "p-1,1,1,1\n", "line 3: 4 cells in 5 columns"),
        (FEW + "p-1,1,1,1,1,1\n", "line 3: 6 cells in 5 columns"),
        (FEW + 'p-1,1,1,1,"1\n', "invalid CSV"),
        (
            PODS + "p-3,1,1,1,1,,LS,Running,5,4,\n",
            "line 5: the pod ended (4) before it started (5)",
        ),
        (PODS + "p-3,1,1,1,1,,LS,Running,nan,4,\n", "line 5: creation_time is 'nan'"),
        (PODS + "p-3,1,1,1,1,,LS,Running,1e99,4,\n", "line 5: creation_time is '1e99'"),
        (FEW.encode() + b"p-1,\xff,1,1,1\n", "line 3: bytes are not UTF-8 text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        read_pods(path)
    assert said in refused.value.message
    assert refused.value.message.startswith(str(path))
    assert refused.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none.csv: No such file"):
        read_nodes(tmp_path / "none.csv")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (FEW + text).encode()))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = file(tmp_path_factory.mktemp("any"), content)
    with suppress(UsageError):
        assert read_pods(path)


amounts = st.integers(0, 10**6)
shapes = st.builds(
    TraceShape,
    cpu_milli=amounts,
    gpus=st.integers(1, 8),
    gpu_milli=st.integers(1, 1000),
    models=st.sets(st.sampled_from(["T4", "P100", "A, B"])).map(lambda some: tuple(sorted(some))),
    gpu_memory_mib=st.none() | amounts,
)


@given(shape=shapes, created=st.none() | amounts, duration=amounts, memory=amounts)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    shape: TraceShape,
    created: int | None,
    duration: int,
    memory: int,
) -> None:
    pod = TracePod(
        name="p, 1",
        shape=shape,
        memory_mib=memory,
        created_s=created,
        duration_s=None if created is None else duration,
        line=2,
    )
    folder = tmp_path_factory.mktemp("written")
    assert read_pods(file(folder, pods_text([pod]))) == [pod]
    node = TraceNode(
        name="n", cpu_milli=memory, memory_mib=duration, gpus=3, gpu_memory_mib=created
    )
    assert read_nodes(file(folder, nodes_text([node]))) == [node]
