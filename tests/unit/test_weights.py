"""Weights by rows, from files, a state dict or the live module; what is refused, with its words."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from plait.errors import WeightError
from plait.program import Weight
from plait.runtime import checkpoint
from plait.runtime.checkpoint import Checkpoint, Spec, whole, write
from plait.runtime.rebuild import parameters_on_meta, recompute
from plait.runtime.weights import Tensors, locate, open_source, take


def weights_of(model: nn.Module, attributes: tuple[str, ...] = ()) -> list[Weight]:
    """What capture says of a model's tensors; tied ones once, with all their names."""
    saved = set(model.state_dict(keep_vars=True))
    names: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers())
    tensors |= {name: getattr(model, name) for name in attributes}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    rows = []
    for group in names.values():
        t = tensors[group[0]]
        kind: Any = "parameter" if isinstance(t, nn.Parameter) else "buffer"
        kind = "constant" if group[0] in attributes else kind
        node = group[0].replace(".", "_")
        rows.append(
            Weight(node, tuple(group), kind, tuple(t.shape), t.dtype, persistent=group[0] in saved)
        )
    return rows


def all_parts(weights: list[Weight]) -> dict[str, Any]:
    return {w.name: whole(w.shape) for w in weights}


# --- parts ----------------------------------------------------------------------------------


@st.composite
def shapes_and_parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    part = []
    for n in shape:
        cuts = sorted(draw(st.sets(st.integers(0, n), max_size=4)))
        ranges = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        part.append(ranges if draw(st.booleans()) else ((0, n),))
    return shape, tuple(part)


def by_index(tensor: torch.Tensor, part: Any) -> torch.Tensor:
    for dim, ranges in enumerate(part):
        rows = [i for lo, hi in ranges for i in range(lo, hi)]
        tensor = tensor.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return tensor


@settings(max_examples=150)
@given(shapes_and_parts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_a_part_is_the_same_rows_from_every_source(case: Any, dtype: torch.dtype) -> None:
    shape, part = case
    tensor = torch.randint(-99, 99, shape).to(dtype)
    expected = by_index(tensor, part)
    assert torch.equal(take(tensor, part), expected)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        save_file({"before": torch.ones(3), "t": tensor}, f"{folder}/a.safetensors")
        patch.setattr(checkpoint, "_BLOCK", 40)
        for run in (0, 10**9):  # all by runs, all by blocks
            patch.setattr(checkpoint, "_RUN", run)
            read = Checkpoint(folder).read("t", part)
            assert read.dtype == dtype
            assert torch.equal(read, expected)


def test_a_part_is_memory_of_its_own() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert take(tensor, whole((2, 3))).data_ptr() != tensor.data_ptr()
    assert take(tensor[0, 0], ()).data_ptr() != tensor.data_ptr()


def test_a_rank_reads_its_own_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.randn(64, 4096)}, tmp_path / "a.safetensors")
    count = 0
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        nonlocal count
        got = preadv(fd, buffers, offset)
        count += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    source = Checkpoint(tmp_path)
    assert count == 0
    for part in [(((16, 32),), ((0, 4096),)), (((0, 64),), ((1024, 2048), (3072, 4096)))]:
        count = 0
        assert source.read("w", part).nbytes == count


# --- files ----------------------------------------------------------------------------------


def test_a_file_a_folder_and_an_index(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4), "c": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "one.safetensors")
    folder = tmp_path / "two"
    folder.mkdir()
    save_file({"a": tensors["a"]}, folder / "x.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "y.safetensors")
    indexed = tmp_path / "three"
    indexed.mkdir()
    save_file(tensors, indexed / "part.safetensors")
    save_file(tensors, indexed / "consolidated.safetensors")  # not in the index: not read
    (indexed / checkpoint.INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")})
    )
    for path in (tmp_path / "one.safetensors", folder, indexed, indexed / checkpoint.INDEX):
        source = Checkpoint(path)
        assert source.specs.keys() == tensors.keys()
        assert all(torch.equal(source.read(name), t) for name, t in tensors.items())


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="does not exist; weights are read from safetensors"):
        Checkpoint(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightError, match=r"holds no safetensors file, but pytorch_model\.bin"):
        Checkpoint(tmp_path)
    save_file({"a": torch.ones(99)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-8])
    with pytest.raises(WeightError, match="a lies at 0:396, beyond its size or the file"):
        Checkpoint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(data[:20])
    with pytest.raises(WeightError, match="is cut short"):
        Checkpoint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 4) + b"{no}" + b"0" * 9)
    with pytest.raises(WeightError, match="its header is no JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(data)
    (tmp_path / "b.safetensors").write_bytes(data)
    with pytest.raises(WeightError, match="a is in two files"):
        Checkpoint(tmp_path)
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "c.safetensors"}}))
    with pytest.raises(WeightError, match=r"files that are not there: c\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'])
def test_what_is_no_index(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.INDEX).write_text(text)
    with pytest.raises(WeightError, match=r"index\.json is no index of safetensors files"):
        Checkpoint(tmp_path)


FIELDS = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "x", [-1, "a"], [[]], {}])
def test_what_is_no_header(tmp_path: Path, field: str, value: Any) -> None:
    header = json.dumps({"a": FIELDS | {field: value}, "b": FIELDS}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    with pytest.raises(WeightError, match="a has (no dtype, shape and data_offsets|dtype x, which is not known)"):
        Checkpoint(tmp_path)


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="holds no safetensors file; weights"):
        Checkpoint(tmp_path)


def test_tensors_without_values_are_named() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2, device="meta"), "c": 3, "d": torch.ones(2).to_sparse()}
    words = "no tensor of values: b is on the meta device, c is a int, d is of layout sparse_coo"
    with pytest.raises(WeightError, match=words):
        open_source(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", [10**9, 150])
def test_what_is_written_is_read_by_safetensors(tmp_path: Path, shard: int) -> None:
    tensors = {
        "a.weight": torch.randn(5, 4).bfloat16(),
        "t": torch.randn(4, 5).T,  # strided
        "b": torch.arange(7),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "tied": torch.ones(3),
        "tied.again": torch.ones(3),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
    }
    specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write(tmp_path, specs, iter(tensors.values()), shard=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == (1 if shard > 150 else 2)
    read = {name: t for file in files for name, t in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].double(), tensor.double())
        assert torch.equal(Checkpoint(tmp_path).read(name).double(), tensor.double())
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    spec = {"a": Spec((2,), torch.float32), "b": Spec((2,), torch.float32)}
    write(tmp_path, spec, [torch.ones(2), torch.ones(2)], shard=8)

    def breaks() -> Any:
        yield torch.zeros(2)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, spec, breaks())
    assert torch.equal(Checkpoint(tmp_path).read("a"), torch.ones(2))
    assert not list(tmp_path.glob(".*"))
    write(tmp_path, spec, [torch.zeros(2), torch.ones(2)])  # one file takes the place of three
    assert torch.equal(Checkpoint(tmp_path).read("a"), torch.zeros(2))


# --- finding --------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Identity(), nn.Linear(8, 4, bias=False))
    model[0].weight.data = torch.arange(8.0)[:, None].expand(8, 4).clone()
    model[2].weight.data = torch.arange(8.0)[None].expand(4, 8).clone()
    return model


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 4])
def test_a_ranks_part_holds_its_own_rows(
    tmp_path: Path, files: int, dtype: torch.dtype, n: int
) -> None:
    state = {name: t.to(dtype) for name, t in two_layers().state_dict().items()}
    for i, group in enumerate([state] if files == 1 else [{k: v} for k, v in state.items()]):
        save_file(group, tmp_path / f"{i}.safetensors")
    with torch.device("meta"):
        empty = two_layers_like()
    loading = locate(weights_of(empty), model=empty, source=open_source(tmp_path))
    for rank in range(n):
        lo, hi = 8 * rank // n, 8 * (rank + 1) // n
        parts = {"0.weight": (((lo, hi),), ((0, 4),)), "2.weight": (((0, 4),), ((lo, hi),))}
        got = loading.load(parts)
        rows = torch.arange(lo, hi, dtype=torch.float32)
        assert torch.equal(got["0.weight"], rows[:, None].expand(-1, 4))
        assert torch.equal(got["2.weight"], rows[None].expand(4, -1))
        assert got["0.weight"].dtype == torch.float32  # the model's, not the file's
        assert loading.load(parts, dtype=torch.float64)["0.weight"].dtype == torch.float64


def two_layers_like() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Identity(), nn.Linear(8, 4, bias=False))


def test_one_error_names_everything_that_does_not_fit() -> None:
    model = two_layers()
    state = {"0.weight": torch.ones(8, 5), "1.weight": torch.ones(1), "3.bias": torch.ones(1)}
    with pytest.raises(WeightError) as caught:
        locate(weights_of(model), model=model, source=open_source(state))
    assert isinstance(caught.value, KeyError)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the weights do not fit the model (the state dict)"
    assert "  missing: 2.weight" in lines
    assert "  extra: 1.weight, 3.bias" in lines
    assert "  other shape: 0.weight [8, 5], the model's is [8, 4]" in lines


def test_a_prefix_that_explains_what_is_missing_is_named() -> None:
    model = two_layers()
    state = model.state_dict()
    with pytest.raises(WeightError, match="the source has them all under 'model.'"):
        locate(weights_of(model), source=Tensors({f"model.{k}": v for k, v in state.items()}))
    wrapped = nn.ModuleDict({"transformer": model})
    with pytest.raises(WeightError, match="the source has them without 'transformer.'"):
        locate(weights_of(wrapped), source=Tensors(state))
    with pytest.raises(WeightError, match="0.weight is perhaps 0.weights"):
        locate(weights_of(model), source=Tensors({"0.weights": torch.ones(8, 4)}))
    half = {"0.weight": state["0.weight"], "2.weights": state["2.weight"]}
    with pytest.raises(WeightError, match="2.weight is perhaps 2.weights"):  # and not 0.weight, which is there
        locate(weights_of(model), source=Tensors(half))


def test_whole_numbers_are_no_weights() -> None:
    """A quantised tensor, whose scale is elsewhere, of the right name and shape."""
    model = two_layers()
    state = model.state_dict() | {"2.weight": torch.ones(4, 8, dtype=torch.int8)}
    with pytest.raises(WeightError, match="other kind of numbers: 2.weight torch.int8, the model's is torch.float32"):
        locate(weights_of(model), source=Tensors(state))


def test_tied_numbers_are_compared() -> None:
    model = nn.ModuleDict({"a": nn.ParameterList([nn.Parameter(torch.tensor(2.0))])})
    model["b"] = model["a"]
    state = {"a.0": torch.tensor(2.0), "b.0": torch.tensor(3.0)}
    loading = locate(weights_of(model), source=Tensors(state))
    with pytest.raises(WeightError, match="a.0 and b.0 differ"):
        loading.load({"a.0": ()})


def test_without_weights_a_meta_model_is_refused() -> None:
    with torch.device("meta"):
        empty = two_layers_like()
    with pytest.raises(WeightError, match="no weights= given: 0.weight, 2.weight"):
        locate(weights_of(empty), model=empty)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize(
    "names", [("emb.weight",), ("head.weight",), ("emb.weight", "head.weight")]
)
def test_a_tied_weight_is_found_under_any_of_its_names(names: tuple[str, ...]) -> None:
    model = Tied()
    value = torch.randn(6, 4)
    loading = locate(weights_of(model), source=Tensors(dict.fromkeys(names, value)))
    got = loading.load({"emb.weight": (((2, 5),), ((0, 4),))})
    assert got.keys() == {"emb.weight"}
    assert torch.equal(got["emb.weight"], value[2:5])


def test_tied_weights_that_differ_in_the_file_are_refused() -> None:
    model = Tied()
    source = Tensors({"emb.weight": torch.zeros(6, 4), "head.weight": torch.ones(6, 4)})
    with pytest.raises(WeightError, match=r"emb\.weight and head\.weight differ"):
        locate(weights_of(model), source=source).load(all_parts(weights_of(model)))


def test_unused_weights_may_be_in_the_source() -> None:
    model = two_layers()
    used, unused = weights_of(model)[:1], weights_of(model)[1:]
    loading = locate(used, source=Tensors(model.state_dict()), unused=unused)
    assert loading.load(all_parts(used)).keys() == {"0.weight"}


def test_the_live_module_is_copied_never_aliased() -> None:
    model = nn.BatchNorm1d(3)
    loading = locate(weights_of(model), model=model)
    for name, tensor in loading.load(all_parts(weights_of(model))).items():
        live = model.get_parameter(name) if name in ("weight", "bias") else model.get_buffer(name)
        assert torch.equal(tensor, live)
        assert tensor.data_ptr() != live.data_ptr()


# --- what no checkpoint holds ---------------------------------------------------------------


class Forgets(nn.Module):
    """A buffer and a plain attribute of a module that does not keep its constructor's argument."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(d, d)
        inv_freq = 1 / 10 ** (torch.arange(d) / d)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.mask = 1 - torch.arange(d) / (2 * d)  # not linspace: transformers wraps that one


class Remembers(Forgets):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.d = d


class Changes(Forgets):
    """`base` is kept under its name, but not as it was given."""

    def __init__(self, base: float) -> None:
        super().__init__(8)
        self.base = base + 1
        self.register_buffer("inv_freq", torch.full((8,), base), persistent=False)


class Draws(Forgets):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.d = d
        self.register_buffer("noise", torch.randn(d), persistent=False)


def on_meta(make: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return make(), make_real(make).state_dict()


def make_real(make: Any) -> nn.Module:
    with torch.device("cpu"):
        model: nn.Module = make()
    return model


@pytest.mark.parametrize("make", [Forgets, lambda: Changes(3.0)])
def test_what_cannot_be_computed_is_refused_by_name(make: Any) -> None:
    empty, state = on_meta(make)
    with pytest.raises(WeightError) as caught:
        locate(weights_of(empty, ("mask",)), model=empty, source=open_source(state))
    assert "inv_freq (non-persistent buffer), mask (tensor attribute)" in str(caught.value)
    assert "fc.weight" not in str(caught.value)


def test_what_a_module_remembers_is_computed() -> None:
    empty, state = on_meta(lambda: nn.Sequential(Remembers(8)))
    got = recompute(empty, ["0.inv_freq", "0.mask"])
    real = Remembers(8)
    assert torch.equal(got["0.inv_freq"], real.inv_freq)
    assert torch.equal(got["0.mask"], real.mask)
    weights = weights_of(empty)
    loaded = locate(weights, model=empty, source=open_source(state)).load(all_parts(weights))
    assert torch.equal(loaded["0.inv_freq"], real.inv_freq)


def test_random_buffers_are_not_computed_but_their_neighbours_are() -> None:
    empty, _ = on_meta(lambda: Draws(8))
    before = torch.get_rng_state()
    assert recompute(empty, ["noise", "inv_freq"]).keys() == {"inv_freq"}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_computed_buffer_keeps_its_dtype() -> None:
    """fp32 in a bf16 model stays fp32; one cast with the model is cast after it was computed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, head_dim=8,
    )  # fmt: skip
    name = "model.rotary_emb.inv_freq"
    real = LlamaForCausalLM(config)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    assert torch.equal(recompute(empty, [name])[name], real.get_buffer(name))
    got = recompute(empty.bfloat16(), [name])[name]
    assert torch.equal(got, real.get_buffer(name).bfloat16())
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        half = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert half.get_buffer(name).dtype == torch.float32
    assert torch.equal(recompute(half, [name])[name], real.get_buffer(name))


def test_buffers_are_real_where_only_parameters_are_on_meta() -> None:
    with parameters_on_meta():
        model = Forgets()
    assert model.fc.weight.is_meta
    assert torch.equal(model.inv_freq, Forgets().inv_freq)
    weights = weights_of(model, ("mask",))
    loading = locate(weights, model=model, source=open_source(Forgets().state_dict()))
    assert torch.equal(loading.load(all_parts(weights))["mask"], Forgets().mask)
    assert not Forgets().fc.weight.is_meta


# --- memory ---------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from plait.program import Weight
from plait.runtime.weights import locate, open_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

rows, cols = 1024, 4096
names = [f"w{i}" for i in range(8)]
weights = [Weight(n, (n,), "parameter", (rows, cols), torch.float32) for n in names]
columns = ((0, 256), (3072, 3840))
part = {"rows": (((0, 512),), ((0, cols),)), "columns": (((0, rows),), columns)}[sys.argv[2]]
loading = locate(weights, source=open_source(sys.argv[1]))
loading.load({"w0": (((0, 1),), ((0, 1),))}, dtype=torch.bfloat16)  # what any load imports
before = peak()
runs = [names[:3], names[4:6]]
got = loading.load(dict.fromkeys(names, part), dtype=torch.bfloat16, runs=runs)
held = sum(t.nbytes for t in got.values())
print(peak() - before - held, rows * cols * 4)
"""


@pytest.mark.parametrize("cut", [pytest.param("rows", marks=pytest.mark.full), "columns"])
def test_loading_holds_at_most_one_tensor_more(tmp_path: Path, cut: str) -> None:
    save_file({f"w{i}": torch.randn(1024, 4096) for i in range(8)}, tmp_path / "a.safetensors")
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), cut],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    ).stdout
    more, one_tensor = map(int, out.split())
    assert more <= one_tensor, f"{more} bytes beyond what is kept; one tensor is {one_tensor}"
