"""Clusters: spellings that parse back, paths that depend on places, devices with a clock, bounds."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster, Level, detect, presets, stored
from plait.cluster.presets import BOXES, FABRICS
from plait.cluster.stored import Calibration, Measured
from plait.cluster.units import parse_size, spell_rate, spell_seconds, spell_size
from plait.collectives.schedule import Spec
from plait.cost.bound import bound
from plait.cost.compute import attention_seconds, kernel_seconds
from plait.cost.reading import native_spelling, readings
from plait.errors import ClusterError, InputError, PlaitError
from plait.runtime.calibrate import SQUARE, device_of, own

SPELLINGS = [
    "dgx-h100[8]",
    "dgx-a100[4x8]/roce-200g",
    "dgx-h100[4]",
    "dgx-h100[2x8]/roce+nvls",
    "dgx-b200[4x8]/efa",
    "dgx-a100[12]/ib-hdr",
    "gb200-nvl72[72]",
    "pcie4[8]",
    "loopback[4]",
    "dgx-h100[2x8]/ib-ndr@0,1,8",
]


def links(cluster: Cluster, source: int, target: int) -> list[str]:
    path = cluster.paths(np.array([source]), np.array([target]))[0]
    return [cluster.links[i].name for i in path if i >= 0]


# --- spelling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_preset_spells_itself_and_parses_back(text):
    cluster = Cluster.parse(text)
    assert str(cluster) == text
    assert Cluster.parse(str(cluster)) == cluster
    assert Cluster.from_json(cluster.to_json()) == cluster


@given(
    box=st.sampled_from(sorted(BOXES)),
    fabric=st.sampled_from(sorted(FABRICS)),
    hosts=st.integers(1, 16),
    data=st.data(),
)
def test_any_part_of_any_preset_parses_back(box, fabric, hosts, data):
    whole = Cluster.parse(f"{box}[{hosts}x{BOXES[box].devices}]/{fabric}")
    ranks = data.draw(st.lists(st.integers(0, whole.size - 1), min_size=1, max_size=6, unique=True))
    part = whole.subset(ranks)
    assert Cluster.parse(str(part)) == part
    assert part.size == len(ranks)


def test_a_machine_that_is_no_preset_is_one_line_of_json():
    own = Cluster("mine", BOXES["loopback"].device, (Level("bus", 3, 1e9, 1e-6),))
    assert "\n" not in str(own)
    assert Cluster.parse(str(own)) == own


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"device": 3}', '{"device": {"flops": [], "tiles": []}, "levels": 1}']
)
def test_json_that_is_no_cluster_is_refused_in_words(text):
    with pytest.raises(ClusterError, match="is no cluster .* dgx-h100"):
        Cluster.parse(text)


def test_a_wrong_level_in_json_is_told_as_such():
    own = Cluster("mine", BOXES["loopback"].device, (Level("bus", 3, 1e9, 1e-6),))
    with pytest.raises(ClusterError, match=r"levels \['bus'\] need arity"):
        Cluster.parse(own.to_json().replace('"arity": 3', '"arity": 0'))


def test_a_cluster_has_a_size_that_can_be_written_down():
    with pytest.raises(ClusterError, match=r"800000 devices.*nearest: dgx-h100\[8192x8\]"):
        Cluster.parse("dgx-h100[100000x8]")


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_has_devices_links_and_a_transport(name):
    cluster = Cluster.preset(name)
    assert cluster.size == len(cluster.ranks) == sum(map(len, cluster.nodes))
    assert cluster.links
    assert cluster.transports
    assert cluster.device.memory > 0
    assert Cluster.preset(name, cluster.size * 2).nodes == (
        tuple(range(cluster.size)),
        tuple(range(cluster.size, 2 * cluster.size)),
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cluster.parse("dgx-h101/foo+bar"), ["dgx-h101", "dgx-h100", "foo", "roce", "bar"]),
        (lambda: Cluster.parse("dgx h100"), ["box[hosts x devices]", "dgx-h100"]),
        (lambda: Cluster.parse("dgx-a100+nvls"), ["cannot add", "dgx-h100"]),
        (lambda: Cluster.parse("dgx-h100[2x9]"), ["8 devices", "9"]),
        (lambda: Cluster.preset("dgx-h100", 0), ["at least one"]),
        (lambda: Cluster.preset("dgx-h100").subset([0, 0, 9]), ["0 to 7", "[9]", "[0]", "twice"]),
        (lambda: Cluster.preset("dgx-h100").subset([]), ["none were given"]),
        (lambda: Cluster.preset("dgx-h100").transport("mpi"), ["mpi", "nccl", "symmetric"]),
        (
            lambda: Cluster("x", BOXES["pcie4"].device, (Level("l", 0, 1e9, 0.0),)),
            ["'l'", "above 0"],
        ),
        (lambda: Cluster.preset("dgx-h100").device.peak("complex64"), ["complex64", "bfloat16"]),
    ],
)
def test_errors_say_what_there_is(make, words):
    with pytest.raises(ClusterError) as caught:
        make()
    assert isinstance(caught.value, PlaitError)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


# --- paths ----------------------------------------------------------------------------------------


def test_a_path_is_the_ports_of_the_innermost_level_that_joins_the_two():
    hosts = Cluster.parse("dgx-h100[2x8]")
    assert links(hosts, 1, 2) == ["nvlink 1 out", "nvlink 2 in"]
    assert links(hosts, 1, 10) == ["ib-ndr 0.1 out", "ib-ndr 1.2 in"]


def test_pcie_carries_what_goes_further_out_too():
    boxes = Cluster.parse("pcie4[2x8]")
    assert links(boxes, 0, 1) == ["pcie 0 out", "pcie 1 in"]
    assert links(boxes, 0, 5) == ["pcie 0 out", "socket 0 out", "socket 1 in", "pcie 5 in"]
    assert links(boxes, 0, 9)[2:4] == ["100gbe 0 out", "100gbe 1 in"]


def test_places_decide():
    near = Cluster.parse("dgx-h100[2x8]").subset([0, 1])
    far = Cluster.parse("dgx-h100[2x8]").subset([0, 8])
    assert links(near, 0, 1)[0].startswith("nvlink")
    assert links(far, 0, 1)[0].startswith("ib-ndr")


def test_ranks_of_one_host_share_its_only_port():
    ethernet = Cluster.parse("dgx-h100[2x8]/100gbe")
    assert links(ethernet, 0, 8) == links(ethernet, 3, 12) == ["100gbe 0 out", "100gbe 1 in"]


def test_a_bus_is_on_every_path():
    assert links(Cluster.preset("loopback", 4), 0, 3)[1] == "loopback bus 0"


def test_a_port_without_duplex_is_one_link_for_both_ways():
    loopback = Cluster.preset("loopback", 4)
    assert links(loopback, 0, 3) == ["loopback 0", "loopback bus 0", "loopback 3"]
    assert links(loopback, 3, 0) == ["loopback 3", "loopback bus 0", "loopback 0"]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_port_without_duplex_carries_twice_the_bytes(n):
    bus = Level("bus", n, 1e9, 0.0)
    two = Cluster("two ways", BOXES["loopback"].device, (bus,))
    one = Cluster("one way", BOXES["loopback"].device, (replace(bus, duplex=False),))
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert bound(collective, one).slope == pytest.approx(2 * bound(collective, two).slope)
    # of a broadcast every byte arrives n - 1 times, and leaves as often
    most = max(1.0, 2 * (n - 1) / n)
    assert bound("broadcast", one).slope == pytest.approx(most / 1e9)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_flat_bound_is_patarasuk_and_yuans(n):
    cluster = Cluster.preset("dgx-h100", n)
    assert bound("all_reduce", cluster).slope == pytest.approx(2 * (n - 1) / n / 450e9)
    for half in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bound(half, cluster).slope == pytest.approx((n - 1) / n / 450e9)
    assert bound("broadcast", cluster).slope == pytest.approx(1 / 450e9)


def test_addition_in_the_switch_lifts_the_bound_to_one_crossing():
    plain = bound("all_reduce", Cluster.preset("dgx-h100"))
    adds = bound("all_reduce", Cluster.preset("dgx-h100+nvls"))
    assert plain.network == plain.slope
    assert adds.slope == plain.slope
    assert adds.network == pytest.approx(1 / 450e9)


def test_hosts_are_cut_at_their_ports():
    two = bound("all_reduce", Cluster.parse("dgx-h100[2x8]"))
    assert two.slope == pytest.approx(max(2 * 15 / 16 / 500e9, 1 / 400e9))
    one_port = bound("all_reduce", Cluster.parse("dgx-h100[2x8]/100gbe"))
    assert one_port.slope == pytest.approx(1 / 12.5e9)
    uneven = Cluster.parse("dgx-h100[2x8]").subset(range(9))  # 8 + 1
    assert bound("all_gather", uneven).slope >= 8 / 9 / 50e9  # into the one


def test_one_rank_has_nothing_to_wait_for():
    alone = bound("all_reduce", Cluster.preset("dgx-h100", 1))
    assert alone(1e9) == 0


# --- devices --------------------------------------------------------------------------------------


def test_matmuls_come_in_waves():
    h100 = Cluster.preset("dgx-h100").device
    full = h100.matmul_seconds(128 * 132, 256, 8192)  # one tile a multiprocessor
    more = h100.matmul_seconds(128 * 133, 256, 8192)
    assert more > 1.05 * full  # the next row of tiles is another, nearly empty wave


def test_matmuls_are_bound_by_memory_when_thin():
    h100 = Cluster.preset("dgx-h100").device
    weights = 2 * 8192 * 8192 / (h100.bandwidth * h100.memory_share)
    assert h100.matmul_seconds(1, 8192, 8192) == pytest.approx(weights, rel=0.1)


def test_big_matmuls_reach_the_share_of_peak_that_was_measured():
    # nvFuser, 2 x H100: M8192 N8192 K16384 twice in 2.70 ms (814 TFLOP/s each)
    h100 = Cluster.preset("dgx-h100").device
    assert h100.matmul_seconds(8192, 8192, 16384) == pytest.approx(2.7e-3, rel=0.12)


def test_products_of_numbers_that_are_no_floats_have_a_price() -> None:
    """A complex one is four of real numbers."""
    device = Cluster.preset("dgx-h100").device
    real = device.matmul_seconds(4096, 4096, 4096, "float32")
    assert device.matmul_seconds(4096, 4096, 4096, "complex64") == pytest.approx(4 * real, rel=0.1)
    assert device.matmul_seconds(64, 64, 64, "int64") > 0


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000))
def test_no_matmul_beats_the_roofline(m, n, k):
    for device in (BOXES["dgx-h100"].device, BOXES["loopback"].device):
        least = max(2 * m * n * k / device.peak("bfloat16"), 2 * m * n / device.bandwidth)
        assert device.matmul_seconds(m, n, k) >= least


def test_a_core_fetches_and_multiplies_in_turn():
    core, h100 = BOXES["loopback"].device, BOXES["dgx-h100"].device
    few, many = (core.matmul_seconds(rows, 1024, 1024, "float32") for rows in (1, 513))
    weights = core.memory_seconds(4 * 1024**2)
    assert many == pytest.approx(513 * (few - weights) + weights, rel=1e-3)
    assert kernel_seconds(core, 1e6, 1e6) > max(kernel_seconds(core, 1e6, 0), kernel_seconds(core, 0, 1e6))
    assert kernel_seconds(h100, 1e6, 1e6) == max(kernel_seconds(h100, 1e6, 0), kernel_seconds(h100, 0, 1e6))


def test_a_measured_core_takes_the_seconds_that_were_measured():
    core = device_of({torch.float32: 0.024, torch.bfloat16: 0.014}, 19e9, 1)
    for dtype, seconds in (("float32", 0.024), ("bfloat16", 0.014)):
        assert core.matmul_seconds(SQUARE, SQUARE, SQUARE, dtype) == pytest.approx(seconds)
    assert core.memory_seconds(19e9) == pytest.approx(1)


def test_empty_work_is_free_and_dtypes_have_their_rates():
    h100 = BOXES["dgx-h100"].device
    assert h100.matmul_seconds(0, 8, 8) == 0
    assert kernel_seconds(h100, 0, 0) == 0
    assert h100.peak("torch.float16") == h100.peak("bfloat16")
    fp8 = h100.matmul_seconds(8192, 8192, 8192, "float8_e4m3fn")
    assert fp8 == pytest.approx(h100.matmul_seconds(8192, 8192, 8192) / 2, rel=0.01)


def test_causal_attention_is_half():
    h100 = BOXES["dgx-h100"].device
    whole = attention_seconds(h100, 1, 64, 8192, 8192, 128)
    half = attention_seconds(h100, 1, 64, 8192, 8192, 128, causal=True)
    assert half == pytest.approx(whole / 2, rel=0.02)


# --- what a machine measured of itself ------------------------------------------------------------


def calibration(host: str) -> Calibration:
    rows = (Measured("ring[4]", 1024, 1e-4),)
    return Calibration(
        Cluster.preset("loopback", 4), "today", host, "2.13.0", "by hand", 0.1, 0.2, rows
    )


def test_a_calibration_is_stored_and_found_by_its_host_and_torch(tmp_path):
    import platform

    where = tmp_path / "a" / "calibration.json"
    mine = calibration(platform.node())
    assert stored.store(mine, where) == where
    assert stored.recall("2.13.0", where) == mine
    assert stored.recall("2.12.0", where) is None
    stored.store(calibration("another host"), where)
    assert stored.recall("2.13.0", where) is None
    where.write_text(json.dumps({"nothing": "of it"}))
    assert stored.recall("2.13.0", where) is None
    assert "mean error 10.0%" in str(mine)


def test_the_machine_at_hand_is_found():
    here = detect()
    assert here.size >= 1
    assert here.source


# --- units ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**45))
def test_sizes_round_trip(nbytes):
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(spell_size(nbytes)) == pytest.approx(nbytes, rel=1e-3)


def test_units():
    assert parse_size("64MiB") == parse_size("64M") == 2**26
    assert parse_size("1.5GB") == 1_500_000_000
    assert spell_seconds(3.2e-6) == "3.2us"
    assert spell_seconds(0.25) == "250ms"
    assert spell_rate(450e9) == "450GB/s"
    with pytest.raises(InputError, match="64MiB"):
        parse_size("many")


def test_what_was_measured_counts_unless_it_is_not_to(tmp_path, monkeypatch):
    import platform

    import torch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = replace(calibration(platform.node()), torch=torch.__version__)
    assert stored.store(known) == tmp_path / "plait" / "calibration.json"
    assert Cluster.of(None).transports == known.cluster.transports
    assert Cluster.of(None, measured=False).transports == presets.make("loopback").transports


def test_what_nccl_was_measured_to_take_prices_its_collectives(tmp_path, monkeypatch):
    """Rows of devices that are slower than the preset, by more at the small end."""
    preset = Cluster.preset("dgx-h200", 4)
    sizes = [4**k for k in range(5, 15)]
    rows = [
        Measured(native_spelling(kind, n), size, 1.3 * seconds + 5e-6)
        for kind in ("all_reduce", "all_gather")
        for n in (2, 4)
        for size in sizes
        for seconds in [native(kind, preset.subset(range(n)), size)]
    ]
    found = own(rows, preset, "nccl", "by hand")
    assert found.error < 0.05, str(found)
    for row in rows:
        spec = Spec.parse(row.spelling)
        part = found.cluster.subset(range(spec.n))
        assert native(spec.collective, part, row.nbytes) == pytest.approx(row.seconds, rel=0.2)
    assert native("broadcast", found.cluster, 2**20) == native("broadcast", preset, 2**20)

    properties = SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, multi_processor_count=132, major=9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    here = replace(detect(), transports=found.cluster.transports)
    stored.store(replace(found, cluster=here))
    assert detect() == here != detect(measured=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect() == detect(measured=False)


def native(kind, cluster, size):
    """Seconds of NCCL's own collective in a CUDA graph."""
    graphed = cluster.with_launch(0.0)
    return min(r.seconds(size) for _, r in readings(kind, graphed, "native", "nccl"))


def test_processes_share_the_memory_of_the_machine_at_hand(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole, third = (detect(measured=False, processes=n) for n in (1, 3))
    assert whole.device.memory > 2**28
    assert third.device.memory == whole.device.memory // 3
    assert str(Cluster.parse(str(third))) == str(third)
    assert third.subset(range(2)).label == "loopback as found (2 devices)"
    assert Cluster.of("loopback").device == presets.make("loopback").device


def test_processes_beside_gpus_run_on_the_host(monkeypatch):
    """Two processes that gloo joins run on the CPU, on a machine with one GPU too."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    here = Cluster.of(None, measured=False, processes=2, kind="cpu")
    assert here.name == "loopback as found" and here.device.kind == "cpu" and here.size >= 2


def test_a_cache_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(InputError, match=r"file/plait cannot be written: Not a directory; XDG_CACHE_HOME"):
        stored.make_room(stored.cache_folder())
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        stored.store(calibration("a host"))
    assert stored.recall("2.13.0") is None


def test_a_user_may_have_no_home(monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert stored.cache_folder().is_absolute()
