"""Published measurements of collectives, as data: what a price is checked and calibrated against.

Each table is one way of measuring on one machine; ways are never mixed in one fit, since the
floor of the same all-reduce on the same 8 GPUs is 6.5 us, 15 us or 40 us depending on who starts
it. Sizes as nccl-tests names them (the whole vector, K = 2**10); rows are `size:value`, values in
us, or in GB/s of bus bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.cluster.units import parse_size

Method = Literal["graph", "stream", "torch"]  # who starts the collective (software.LAUNCH)


@dataclass(frozen=True)
class Table:
    name: str
    cluster: str  # a preset's spelling
    software: str  # whose transport (plait.cluster.software.TRANSPORTS)
    algorithm: str  # what was measured: a schedule's name, or native
    method: Method
    rows: tuple[tuple[int, float], ...]  # bytes, seconds
    source: str
    form: str = ""  # native: the form that the library took (plait.cost.native)
    collective: str = "all_reduce"

    @property
    def machine(self) -> str:
        return box(self.cluster)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.rows)

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(seconds for _, seconds in self.rows)


@dataclass(frozen=True)
class Crossing:
    """`before` is the fastest at `low` bytes, and `after` at `high`: a schedule's name, `native`, or
    one form of it, `native ring`."""

    cluster: str
    software: tuple[str, ...]
    before: str
    low: int
    after: str
    high: int
    source: str

    @property
    def machine(self) -> str:
        return box(self.cluster)


def box(cluster: str) -> str:
    """`dgx-h100` of `dgx-h100[2x8]/roce+nvls`."""
    return re.split(r"[\[/+]", cluster)[0]


def microseconds(text: str) -> tuple[tuple[int, float], ...]:
    return tuple((parse_size(size), float(us) * 1e-6) for size, us in _pairs(text))


def bus_bandwidth(text: str, ranks: int) -> tuple[tuple[int, float], ...]:
    """GB/s of an all-reduce as nccl-tests states them: S / t * 2(N-1)/N."""
    factor = 2 * (ranks - 1) / ranks
    return tuple(
        (parse_size(s), parse_size(s) * factor / (float(gb) * 1e9)) for s, gb in _pairs(text)
    )


def table(name: str, tables: Sequence[Table] | None = None) -> Table:
    return next(t for t in tables or TABLES if t.name == name)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(size, value) for size, value in (word.split(":") for word in text.split())]


# --- the tables ----------------------------------------------------------------------------------

_ML_ENGINEERING = "github.com/stas00/ml-engineering network/README"
_NCCL_README = "github.com/NVIDIA/nccl contrib/custom_algos/allreduce/README, 4 CTAs, CUDA graph"
_V100 = "github.com/haohervchb/sglang-V100 PR 2, one PCIe switch, CUDA graph"
_TWO_H200 = "two H200 on one host, NVLS off, torch 2.11, NCCL 2.28.9, bf16, median of 12 to 15 runs"
_TWO_GRAPH = "the same, 100 in a chain inside one CUDA graph"

TABLES: tuple[Table, ...] = (
    Table(
        "8xH200 NVLS",
        "dgx-h200+nvls",
        "nccl",
        "native",
        "torch",
        bus_bandwidth(
            "32K:1.44 64K:2.93 128K:5.73 256K:11.74 512K:23.94 1M:39.93 2M:64.53 4M:107.16 "
            "8M:155.53 16M:219.89 32M:275.84 64M:346.51 128M:401.93 256M:436.15 512M:450.29 "
            "1G:463.58 2G:469.17 "
            "4G:473.10 8G:477.45 16G:482.26",
            8,
        ),
        f"{_ML_ENGINEERING}, timed from torch, NCCL 2.27.7",
        form="nvls",
    ),
    Table(
        "8xB200",
        "dgx-b200+nvls",
        "nccl",
        "native",
        "torch",
        bus_bandwidth(
            "128K:4.86 256K:9.54 512K:18.71 1M:36.06 2M:63.09 4M:76.48 8M:126.49 16M:254.96 "
            "32M:325.97 64M:400.60 128M:568.38 256M:646.11 512M:688.99 1G:723.34 2G:734.97 "
            "4G:740.64 8G:839.07 "
            "16G:845.67",
            8,
        ),
        f"{_ML_ENGINEERING}, NCCL 2.27.7; ring up to 4G, then NVLS",
        form="ring",
    ),
    Table(
        "4x8xB200 EFA",
        "dgx-b200[4x8]/efa",
        "nccl",
        "native",
        "torch",
        bus_bandwidth(
            "128K:.45 256K:1.33 512K:2.84 1M:5.37 2M:10.38 4M:18.90 8M:35.12 16M:64.43 "
            "32M:91.19 64M:156.74 128M:197.94 256M:229.09 512M:326.90 1G:361.99 2G:372.42 "
            "4G:377.34 8G:380.39 "
            "16G:381.80",
            32,
        ),
        f"{_ML_ENGINEERING}, NCCL 2.27.7, 8 x 400G EFA a host",
        form="ring",
    ),
    Table(
        "8xGB200 MNNVL",
        "gb200-nvl72[8]+nvls",
        "nccl",
        "native",
        "stream",
        microseconds(
            "8:21.57 16:21.06 32:21.99 64:24.87 128:26.53 256:26.77 512:27.06 1K:27.39 "
            "2K:27.89 4K:27.96 8K:28.26 16K:28.49 32K:28.93 64K:29.95 128K:30.64 256K:30.58 "
            "512K:30.86 1M:32.18 2M:35.89 4M:52.72 8M:67.94 16M:102.8 32M:159.5 64M:265.3 "
            "128M:386.9 256M:698.9 512M:1314.7 1G:2544.0 2G:4557.5 4G:9015.4 8G:17887 "
            "16G:35549 32G:70981"
        ),
        "Oracle Cloud guide, nccl-tests, NCCL 2.26.6, 2 trays",
        form="nvls",
    ),
    Table(
        "8xA100",
        "dgx-a100",
        "nccl",
        "native",
        "stream",
        microseconds(
            "32K:43.83 64K:46.80 128K:51.76 256K:61.38 512K:80.40 1M:101.9 2M:101.4 4M:101.5 "
            "8M:133.5 16M:276.6 32M:424.0 64M:684.6 128M:1327.6 256M:2420.6 512M:4218.4 "
            "1G:8203.9 2G:16240 4G:32136 8G:64074 16G:127997"
        ),
        f"{_ML_ENGINEERING}, nccl-tests",
        form="ring",
    ),
    Table(
        "8xGB200 graph",
        "gb200-nvl72[8]+nvls",
        "nccl-symmetric",
        "native",
        "graph",
        microseconds(
            "1K:9.16 4K:9.16 16K:9.57 32K:9.48 64K:16.63 128K:14.13 256K:14.76 512K:15.81 1M:18.16"
        ),
        _NCCL_README,
        form="nvls",
    ),
    Table(
        "8xGB200 one-shot multicast",
        "gb200-nvl72[8]+nvls",
        "multicast",
        "one_shot",
        "graph",
        microseconds(
            "1K:3.81 4K:3.83 16K:4.04 32K:4.15 64K:4.19 128K:6.65 256K:12.42 512K:21.14 1M:39.82"
        ),
        _NCCL_README,
    ),
    Table(
        "8xGB200 two-shot multicast",
        "gb200-nvl72[8]+nvls",
        "multicast",
        "two_shot",
        "graph",
        microseconds(
            "1K:9.13 4K:9.25 16K:9.41 32K:9.59 64K:9.56 128K:9.52 256K:9.76 512K:11.05 1M:13.62"
        ),
        _NCCL_README,
    ),
    Table(
        "8xGB200 two-shot poison",
        "gb200-nvl72[8]",
        "push4",
        "two_shot",
        "graph",
        microseconds(
            "1K:5.74 4K:5.88 16K:6.00 32K:6.10 64K:6.28 128K:6.55 256K:7.29 512K:8.86 1M:14.00"
        ),
        _NCCL_README,
    ),
    Table(
        "4xGB200 graph",
        "gb200-nvl72[4]+nvls",
        "nccl-symmetric",
        "native",
        "graph",
        microseconds("1K:7.70 64K:11.25 128K:13.60 256K:14.23 512K:15.77 1M:17.61"),
        _NCCL_README,
        form="nvls",
    ),
    Table(
        "4xGB200 one-shot multicast",
        "gb200-nvl72[4]+nvls",
        "multicast",
        "one_shot",
        "graph",
        microseconds("1K:3.77 64K:4.13 128K:6.57 256K:11.16 512K:20.59 1M:38.66"),
        _NCCL_README,
    ),
    Table(
        "4xGB200 two-shot multicast",
        "gb200-nvl72[4]+nvls",
        "multicast",
        "two_shot",
        "graph",
        microseconds("1K:9.19 64K:9.43 128K:9.45 256K:9.78 512K:12.64 1M:17.29"),
        _NCCL_README,
    ),
    Table(
        "4xGB200 two-shot poison",
        "gb200-nvl72[4]",
        "push4",
        "two_shot",
        "graph",
        microseconds("1K:5.81 64K:6.26 128K:6.57 256K:7.28 512K:11.01 1M:17.67"),
        _NCCL_README,
    ),
    Table(
        "4xV100 PCIe NCCL",
        "pcie3[4]",
        "nccl",
        "native",
        "graph",
        microseconds("4K:19.4 8K:20.3 16K:22.3 32K:24.2 128K:51.8 384K:83.5"),
        _V100,
        form="ring",
    ),
    Table(
        "4xV100 PCIe one-shot",
        "pcie3[4]",
        "push",
        "one_shot",
        "graph",
        microseconds("4K:4.0 8K:5.0 16K:7.2 32K:11.8 128K:44.5 384K:120.3"),
        f"{_V100}, push",
    ),
    Table(
        "8xH100 NVLS vLLM",
        "dgx-h100+nvls",
        "nccl",
        "native",
        "graph",
        microseconds("512K:24 1M:25 4M:50 16M:121 64M:316"),
        "github.com/vllm-project/vllm PR 42324",
        form="nvls",
    ),
    Table(
        "8xH100 two-shot vLLM",
        "dgx-h100",
        "symmetric",
        "two_shot",
        "graph",
        microseconds("512K:15 1M:17 4M:37 16M:125 64M:468"),
        "github.com/vllm-project/vllm PR 42324",
    ),
    Table(
        "8xH100 NVLS TokenWeave",
        "dgx-h100+nvls",
        "nccl",
        "native",
        "stream",
        microseconds("1M:36 4M:66.5 16M:137 64M:348 256M:1232"),
        "TokenWeave artifact CSV, hidden 8192 bf16",
        form="nvls",
    ),
    Table(
        "8xH100 MSCCL++ plot",
        "dgx-h100",
        "nccl",
        "native",
        "graph",
        microseconds("1K:15.0 64K:17.8 512K:19.0 1M:24.0"),
        "NCCL curve of the plot in github.com/microsoft/mscclpp",
        form="ring",
    ),
    Table(
        "4xH100 vLLM",
        "dgx-h100[4]",
        "nccl",
        "native",
        "graph",
        microseconds("512K:17 1M:19 2M:26 4M:37"),
        "github.com/vllm-project/vllm PR 24111",
        form="ring",
    ),
    Table(
        "4xH100 one-shot vLLM",
        "dgx-h100[4]",
        "symmetric",
        "one_shot",
        "graph",
        microseconds("512K:10 1M:15 2M:22 4M:38"),
        "github.com/vllm-project/vllm PR 24111",
    ),
    Table(
        "4xH100 two-shot vLLM",
        "dgx-h100[4]",
        "symmetric",
        "two_shot",
        "graph",
        microseconds("512K:18 1M:19 2M:23 4M:29"),
        "github.com/vllm-project/vllm PR 24111",
    ),
    Table(
        "2xH200",
        "dgx-h200[2]",
        "nccl",
        "native",
        "torch",
        microseconds("8M:76 32M:164 128M:499"),
        _TWO_H200,
        form="ring",
    ),
    Table(
        "2xH200 two-shot",
        "dgx-h200[2]",
        "symmetric",
        "two_shot",
        "torch",
        microseconds("8M:59 32M:140 128M:437"),
        _TWO_H200,
    ),
    Table(
        "2xH200 graph",
        "dgx-h200[2]",
        "nccl",
        "native",
        "graph",
        microseconds("16K:15 64K:15 256K:15 1M:23 2M:37"),
        _TWO_GRAPH,
        form="ring",
    ),
    Table(
        "2xH200 one-shot graph",
        "dgx-h200[2]",
        "symmetric",
        "one_shot",
        "graph",
        microseconds("16K:6.9 64K:6.7 256K:8.7 1M:13.1 2M:18.9"),
        _TWO_GRAPH,
    ),
    Table(
        "2xH200 two-shot graph",
        "dgx-h200[2]",
        "symmetric",
        "two_shot",
        "graph",
        microseconds("16K:7.0 64K:7.2 256K:7.5 1M:10.1 2M:13.0"),
        _TWO_GRAPH,
    ),
)

# --- who wins ------------------------------------------------------------------------------------

_TUNING = "NCCL 2.30's own constants (src/graph/tuning.cc), 16 channels, NVLS off, sizes in doublings"

CROSSINGS: tuple[Crossing, ...] = (
    *(
        Crossing(
            f"dgx-h100[{hosts}x8]",
            ("nccl",),
            "native tree",
            parse_size(size) // 2,
            "native ring",
            parse_size(size),
            _TUNING,
        )
        for hosts, size in ((2, "32M"), (4, "1G"), (8, "2G"), (16, "4G"), (32, "8G"), (64, "16G"))
    ),
    Crossing(
        "dgx-h100[5x8]/roce",
        ("nccl",),
        "native tree",
        parse_size("4M"),
        "native ring",
        parse_size("1G"),
        "nccl issue 1368: 190 against 150 GB/s at 1 GB",
    ),
    *(
        Crossing(
            "dgx-h100+nvls",
            ("nccl",),
            "native ring",
            parse_size(low),
            "native nvls",
            parse_size(high),
            f"{_ML_ENGINEERING}, nccl-tests issue 309: ring up to 1 MiB, NVLS from 2 MiB",
        )
        for low, high in (("1K", "64M"), ("256K", "8M"), ("1M", "2M"))
    ),
    *(
        Crossing(
            f"dgx-h100[{n}]",
            ("symmetric",),
            "one_shot",
            parse_size(low),
            "two_shot",
            parse_size(high),
            "vLLM's custom all-reduce changes over at half of the upper size",
        )
        for n, low, high in ((4, "256K", "1M"), (8, "128K", "512K"))
    ),
    Crossing(
        "dgx-h100+nvls",
        ("symmetric", "nccl"),
        "two_shot",
        parse_size("4M"),
        "native",
        parse_size("64M"),
        "vLLM PR 42324: 37 against 50 us, 468 against 316 us; 125 against 121 at 16M",
    ),
)
