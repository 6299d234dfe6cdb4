"""Machines by name. Spelling: box[hosts x devices]/fabric+option@subset; only the box is needed.

    dgx-h100              8 H100 under NVSwitch           dgx-h100[4]       half of one
    dgx-h100[2x8]/roce    two of them over 400G RoCE      dgx-h100+nvls     the switch adds
    gb200-nvl72           one domain of 72                loopback[4]       4 processes of this host

Plait's own transports never use in-switch reduction, so plans are made without it; `+nvls` (and
`+sharp` for InfiniBand) describe the machine as NCCL uses it by default. Line rates are the
vendors'; what software reaches of them (`share`) and its latencies are fitted to published
measurements (bench/price.py, docs/cost-model.md).
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from plait.cluster.device import Device
from plait.cluster.devices import DEVICES
from plait.cluster.software import GLOO, SHARED, nccl, symmetric
from plait.cluster.stored import recall
from plait.cluster.topology import Cluster, Level
from plait.cluster.transport import Transport
from plait.errors import ClusterError

FOUND = " as found"  # ends the name of a machine that was detected
MOST = 1 << 16  # devices of a cluster that is described


@dataclass(frozen=True)
class Box:
    """A host: its devices under levels, how they talk, and the fabric that joins several."""

    device: Device
    levels: tuple[Level, ...]
    transports: tuple[Transport, ...]
    fabric: str
    nics: int | None = None  # None: one for each device
    reduces: float = 0.0  # Level.reduces of its innermost switch, if that is chosen (option nvls)

    @property
    def devices(self) -> int:
        count = 1
        for level in self.levels:
            count *= level.arity
        return count


def make(name: str, devices: int | None = None) -> Cluster:
    """`make("dgx-h100", 16)`: two hosts; fewer devices than a host has: the first of them."""
    box, fabric, options = _parts(name)
    count = BOXES[box].devices if devices is None else devices
    hosts = -(-count // BOXES[box].devices)
    if count < 1:
        raise ClusterError(f"{name}: {count} devices; a cluster has at least one")
    cluster = _build(box, fabric, options, hosts)
    return cluster if count == cluster.capacity else cluster.subset(range(count))


def parse_preset(text: str) -> Cluster:
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ClusterError(
            f"{text!r} names no cluster; it reads box[hosts x devices]/fabric+option@subset, for "
            f"example dgx-h100[2x8]/ib-ndr. Boxes: {', '.join(BOXES)}; "
            f"fabrics: {', '.join(FABRICS)}"
        )
    name = (
        match["box"] + (f"/{match['fabric']}" if match["fabric"] else "") + (match["options"] or "")
    )
    box, fabric, options = _parts(name)
    full = BOXES[box].devices
    hosts, each = 1, full
    if match["size"]:
        sizes = [int(word) for word in match["size"].split("x")]
        hosts, each = (sizes[0], sizes[1]) if len(sizes) == 2 else (-(-sizes[0] // full), sizes[0])
    if len(match["size"].split("x") if match["size"] else ()) == 2 and not 1 <= each <= full:
        raise ClusterError(f"{text}: a {box} has {full} devices, not {each}")
    if min(hosts, each) < 1:
        raise ClusterError(f"{text}: a cluster has at least one device")
    cluster = _build(box, fabric, options, hosts)
    if match["subset"]:
        return cluster.subset([int(place) for place in match["subset"].split(",")])
    if match["size"] and "x" in match["size"]:
        chosen = [host * full + device for host in range(hosts) for device in range(each)]
    else:
        chosen = list(range(each))
    return cluster if len(chosen) == cluster.capacity else cluster.subset(chosen)


def grow(cluster: Cluster, devices: int) -> Cluster:
    """The same kind of machine with at least so many devices: more of its hosts over its fabric.

    A machine that is no preset grows at its outermost level.
    """
    if devices <= cluster.size:
        return cluster
    full = replace(cluster, places=None)
    if full.size >= devices:
        return full.subset(range(devices))
    try:
        box, fabric, options = _parts(cluster.name.removesuffix(FOUND))
    except ClusterError:
        inner = full.size // full.levels[-1].arity
        outer = replace(full.levels[-1], arity=-(-devices // inner))
        return replace(full, levels=(*full.levels[:-1], outer)).subset(range(devices))
    grown = _build(box, fabric, options, -(-devices // BOXES[box].devices))
    return replace(grown, device=cluster.device).subset(range(devices))


def spell(cluster: Cluster) -> str | None:
    """The preset's spelling of a cluster that is exactly a preset or part of one."""
    try:
        box, fabric, options = _parts(cluster.name)
    except ClusterError:
        return None
    hosts = cluster.capacity // BOXES[box].devices
    if replace(cluster, places=None) != _build(box, fabric, options, hosts):
        return None
    suffix = (f"/{fabric}" if hosts > 1 or "sharp" in options else "") + "".join(
        f"+{o}" for o in options
    )
    full = BOXES[box].devices
    size = f"[{hosts}x{full}]" if hosts > 1 else f"[{full}]"
    if cluster.places is None:
        return f"{box}{size}{suffix}"
    if cluster.places == tuple(range(cluster.size)) and hosts == -(-cluster.size // full):
        return f"{box}[{cluster.size}]{suffix}"
    return f"{box}{size}{suffix}@{','.join(map(str, cluster.places))}"


def names() -> tuple[str, ...]:
    """Every box, and every box that can with its switch's reduction."""
    able = tuple(f"{name}+nvls" for name, box in BOXES.items() if box.reduces)
    return (*BOXES, *able)


def detect(measured: bool = True, processes: int = 1, kind: str = "") -> Cluster:
    """The machine at hand, as `plait calibrate` last measured it if that is to count: its GPUs as torch sees
    them, else the loopback of this host, its memory shared by so many `processes`; that too where the `kind` of
    device that runs the program is "cpu", whatever else there is."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() and kind != "cpu" else 0
    if count == 0:
        known = recall(torch.__version__) if measured else None
        host = known.cluster if known else replace(make("loopback"), name="loopback" + FOUND)
        return replace(host, device=replace(host.device, memory=host_memory() // processes))
    found = torch.cuda.get_device_properties(0)
    known = recall(torch.__version__, kind="cuda") if measured else None
    if known and (known.cluster.size, known.cluster.device.name) == (count, found.name):
        return known.cluster
    peers = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
    box = _box_like(found.major, found.total_memory, peers)
    device = replace(
        BOXES[box].device,
        name=found.name,
        memory=found.total_memory,
        units=found.multi_processor_count,
    )
    cluster = make(box, count)
    return replace(
        cluster,
        name=box + FOUND,
        device=device,
        source=f"{count} x {found.name} by torch {torch.__version__}; rates of the preset {box}",
    )


def host_memory() -> int:
    """Bytes of this host, or as many as its container may have of them."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one with no limit
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


def _box_like(major: int, memory: int, peers: bool) -> str:
    """The preset of the same generation: NVLink if every device reaches every other, else PCIe."""
    if not peers or major < 8:
        return "pcie4" if major < 9 else "pcie5"
    if major == 8:
        return "dgx-a100"
    if major == 9:
        return "dgx-h200" if memory > 100e9 else "dgx-h100"
    return "dgx-b200"


def _parts(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Box, fabric and options of `dgx-h100/ib-ndr+nvls`; an error names what exists."""
    base, *options = name.split("+")
    box, _, fabric = base.partition("/")
    wrong = [
        f"no {what} is called {word!r}; there are {', '.join(table)}"
        for what, word, table in (("box", box, BOXES), ("fabric", fabric or "ib-ndr", FABRICS))
        if word not in table
    ]
    wrong += [
        f"no option is called {o!r}; there are nvls, sharp"
        for o in options
        if o not in ("nvls", "sharp")
    ]
    if not wrong and "nvls" in options and not BOXES[box].reduces:
        able = ", ".join(name for name, b in BOXES.items() if b.reduces)
        wrong.append(f"the switch of {box} cannot add; these can: {able}")
    if wrong:
        raise ClusterError(f"{name}: " + "; ".join(wrong))
    return box, fabric or BOXES[box].fabric, tuple(sorted(set(options)))


@lru_cache(maxsize=256)
def _build(box: str, fabric: str, options: tuple[str, ...], hosts: int) -> Cluster:
    spec = BOXES[box]
    if hosts * spec.devices > MOST:
        raise ClusterError(
            f"{hosts} x {box} are {hosts * spec.devices} devices, and {MOST} are the most that a "
            f"cluster has; nearest: {box}[{MOST // spec.devices}x{spec.devices}]"
        )
    levels = list(spec.levels)
    if "nvls" in options:
        levels[0] = replace(levels[0], reduces=spec.reduces)
    if hosts > 1:
        outer = FABRICS[fabric]
        ports = outer.ports if outer.ports is not None else spec.nics
        levels.append(replace(outer, arity=hosts, ports=ports, reduces=float("sharp" in options)))
    name = box + (f"/{fabric}" if hosts > 1 or "sharp" in options else "")
    return Cluster(
        name="+".join((name, *options)),
        device=spec.device,
        levels=tuple(levels),
        transports=spec.transports,
        source="presets",
    )


# --- fabrics between hosts: line rate of one port and direction, latency of one hop --------------


def _fabric(
    name: str, rate: float, hop: float, share: float, ports: int | None = None, ordered: bool = True
) -> Level:
    return Level(name, 2, rate, hop, share, ports, ordered=ordered, network=True)


FABRICS: dict[str, Level] = {
    "ib-hdr": _fabric("ib-hdr", 25e9, 2.7e-6, share=0.96),
    "ib-ndr": _fabric("ib-ndr", 50e9, 2.7e-6, share=0.96),
    "roce": _fabric("roce", 50e9, 3.5e-6, share=0.95),
    # clusters of A100: NCCL reaches 24 of 25 GB/s by either network (NVIDIA GTC24 S62129)
    "roce-200g": _fabric("roce-200g", 25e9, 3.5e-6, share=0.96),
    "efa": _fabric("efa", 50e9, 15e-6, share=0.97, ordered=False),
    "100gbe": _fabric("100gbe", 12.5e9, 25e-6, share=0.85, ports=1),
}

# --- boxes ---------------------------------------------------------------------------------------


_GPU_SOFTWARE = (nccl(SHARED), symmetric(SHARED))


def _nvswitch(
    device: str, arity: int, gb: float, hop: float, fabric: str, reduces: float = 0.0
) -> Box:
    """One direction of a device's NVLinks, in GB/s; a copy reaches 396 of 450 (ml-engineering)."""
    level = Level("nvlink", arity, gb * 1e9, hop, share=0.88)
    return Box(DEVICES[device], (level,), _GPU_SOFTWARE, fabric, reduces=reduces)


def _pcie(device: str, gb: float) -> Box:
    """Two sockets, four cards under each one's switch; peers across them share its uplink."""
    switch = Level("pcie", 4, gb * 1e9, 1.0e-6, share=0.8, through=True)
    socket = Level("socket", 2, gb * 1e9, 1.5e-6, share=0.8, ports=1, through=True)
    return Box(DEVICES[device], (switch, socket), _GPU_SOFTWARE, "100gbe", nics=1)


# A hop of NVLink: NCCL's tables say 0.6 us for all; rings of 2 to 8 A100 grow by 2 us a hop
# (nccl-tests issue 123), of 4 to 8 GB200 by 0.2 us. Between these. What the switch's additions reach is
# NCCL's (src/graph/tuning.cc 2.30, nvlsEfficiency).
BOXES: dict[str, Box] = {
    "pcie3": _pcie("v100", 15.75),
    "pcie4": _pcie("a100-pcie", 32),
    "pcie5": _pcie("h100-pcie", 63),
    "dgx-a100": _nvswitch("a100", 8, 300, 0.8e-6, "ib-hdr"),
    "dgx-h100": _nvswitch("h100", 8, 450, 0.5e-6, "ib-ndr", 0.85),
    "dgx-h200": _nvswitch("h200", 8, 450, 0.5e-6, "ib-ndr", 0.85),
    "dgx-b200": _nvswitch("b200", 8, 900, 0.3e-6, "ib-ndr", 0.74),
    "gb200-nvl72": _nvswitch("gb200", 72, 900, 0.3e-6, "ib-ndr", 0.74),
    # `plait calibrate`, 2026-11-30: a virtual machine of 2 cores (AMD EPYC), torch 2.13.0, gloo, 2 and
    # 4 processes, 4 KiB to 16 MiB. A core copies the bytes of its process out and in: one rate.
    "loopback": Box(
        DEVICES["cpu"],
        (Level("loopback", 64, 2.69e9, 50e-6, total=3.31e9, duplex=False),),
        (GLOO,),
        "100gbe",
    ),
}

_SPELLING = re.compile(
    r"(?P<box>[a-z0-9-]+)(?:\[(?P<size>\d+(?:x\d+)?)\])?(?:/(?P<fabric>[a-z0-9-]+))?"
    r"(?P<options>(?:\+[a-z]+)*)(?:@(?P<subset>\d+(?:,\d+)*))?"
)
