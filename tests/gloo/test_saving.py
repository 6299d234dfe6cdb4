"""Weights in and out: whole tensors under the model's names, from and to any mesh."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from plait.errors import InputError, NotYetError, PlaitError, WeightError
from tests.cases import CASES, Case, Mesh, Setup
from tests.cases.order import Rotated
from tests.compare import EXACT, demand, differences, digest, discrepancies, reference, within
from tests.gloo import prove
from tests.gloo.harness import Pool

FULL = pytest.mark.full
SAVED = (
    "b13_vocabulary_does_not_divide",
    "b14_tied_embedding_and_head",
    "b05_fused_qkv_in_by_out",
    "b10_values_made_per_head",
    "b56_parameter_of_one_row",
    "groups_nine_over_three",
    "buffers_that_move",
)


def round_trip(group: Any, name: str, tp: int, folder: str) -> None:
    """Saved at tp, it loads in the plain module, and the other way round; then both step."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh(tp), group)
    train(parts, setup, 2)
    parts.save(folder)
    dist.barrier(group)
    state = parts.state_dict()
    plain = copy.deepcopy(setup.model)
    plain.load_state_dict(state, strict=True)
    demand(differences(dict(plain.state_dict()), dict(state), "loaded", EXACT), about=name)
    assert list(state) == list(setup.model.state_dict())
    written: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        written |= load_file(file)
    for key, value in written.items():
        demand(differences(value, state[key], f"file[{key!r}]", EXACT), about=name)
    assert {id(state[k]) for k in written} == {id(v) for v in state.values()}, "names are missing"
    again = prove.compiled(case, setup, Mesh(tp), group)
    again.load_state_dict(plain.state_dict())
    for module in (again, plain):
        module.zero_grad()
        train(module, setup, 1)
    close = within(1e-7, 1e-9)
    demand(
        differences(dict(again.state_dict()), dict(plain.state_dict()), "next", close), about=name
    )


def train(module: nn.Module, setup: Setup, count: int) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        args, kwargs = setup.inputs()
        setup.loss(module(*args, **kwargs)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.sample(2)
def test_saved_and_loaded(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(round_trip, 4, name, 4, str(tmp_path))


def across(group: Any, name: str, folder: str) -> None:
    """A folder written at another tp is read by this one."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    whole: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        whole |= load_file(file)
    parts = prove.compiled(case, setup, Mesh(dist.get_world_size(group)), group, weights=folder)
    state = parts.state_dict()
    demand(differences({k: state[k] for k in whole}, whole, "state", EXACT), about=name)


@pytest.mark.parametrize("name", [pytest.param(n, marks=FULL if i % 2 else ()) for i, n in enumerate(SAVED)])
@pytest.mark.sample(2)
def test_a_folder_serves_any_mesh(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(written, 4, name, str(tmp_path))
    pool.run(across, 2, name, str(tmp_path))


def one_mesh(group: Any, name: str, mesh: str, source: str, target: str) -> str:
    """Reads a folder from the meta device, trains a step by step(), and writes another."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    plain = copy.deepcopy(setup.model)
    plain.load_state_dict(load_file(Path(source) / "model.safetensors"), strict=False)
    empty = on_meta(case, setup)
    parts = prove.compiled(case, empty, Mesh.parse(mesh), group, weights=source)
    demand(differences(dict(parts.state_dict()), dict(plain.state_dict()), "read", EXACT), about=mesh)
    for module in (parts, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        args, kwargs = setup.inputs()
        if isinstance(module, plait.Compiled):
            module.step(*args, loss_fn=setup.loss, **kwargs)
        else:
            setup.loss(module(*args, **kwargs)).backward()
        optimizer.step()
    state = dict(parts.state_dict())
    demand(differences(state, dict(plain.state_dict()), "stepped", within(1e-9, 1e-11)), about=mesh)
    again = prove.compiled(case, setup, Mesh.parse(mesh), group)
    again.load_state_dict(state)
    demand(differences(dict(again.state_dict()), state, "loaded", EXACT), about=mesh)
    parts.save(target)
    return digest(state)


def on_meta(case: Case, setup: Setup) -> Setup:
    """The model as its constructor makes it on the meta device: `.to("meta")` would untie weights."""
    with torch.device("meta"):
        return Setup(case.build().model.double(), setup.args, setup.kwargs, setup.loss)


@pytest.mark.parametrize(
    "name",
    ["b14_tied_embedding_and_head", pytest.param("b31_tied_over_stages", marks=pytest.mark.full)],
)
def test_weights_move_between_meshes(pool: Pool, tmp_path: Path, name: str) -> None:
    """Of tied weights a file has one name, as Hugging Face writes them; every stage finds its own."""
    state = dict(CASES[name].setup(torch.float64).model.state_dict())
    del state["head.weight"]
    kept = {k: v.clone() for k, v in state.items() if not k.startswith("mid.3")}
    folders = [tmp_path / str(i) for i in range(5)]
    folders[0].mkdir()
    save_file(kept, folders[0] / "model.safetensors")
    for i, mesh in enumerate(("tp2", "pp2", "tp2xpp2", "pp3")):
        source, target = str(folders[i]), str(folders[i + 1])
        seen = pool.run(one_mesh, Mesh.parse(mesh).size, name, mesh, source, target)
        assert len(set(seen)) == 1


def without_a_weight(group: Any, folder: str) -> None:
    case = CASES["b14_tied_embedding_and_head"]
    empty = on_meta(case, case.setup(torch.float64))
    prove.compiled(case, empty, Mesh(1, dist.get_world_size(group)), group, weights=folder)


@pytest.mark.parametrize("pp", [2, 3])
def test_a_tied_weight_in_no_file_is_named_on_every_stage(
    pool: Pool, tmp_path: Path, pp: int
) -> None:
    state = CASES["b14_tied_embedding_and_head"].setup().model.state_dict()
    kept = {n: v for n, v in state.items() if n not in ("emb.weight", "head.weight")}
    save_file(kept, tmp_path / "model.safetensors")
    for failure in pool.errors(without_a_weight, pp, str(tmp_path)):
        assert isinstance(failure.error, plait.errors.WeightError), failure.traceback
        assert "emb.weight" in failure.message


def written(group: Any, name: str, folder: str) -> None:
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh(dist.get_world_size(group)), group)
    train(parts, setup, 1)
    parts.save(folder)


def save_alone(group: Any, folder: str) -> float:
    """Rank 0 saves, the others do not come: seconds until its error."""
    case = CASES["b01_bias_after_the_sum"]
    parts = prove.compiled(case, case.setup(), Mesh(2), group)
    if dist.get_rank(group) > 0:
        time.sleep(33)
        return 0.0
    start = time.monotonic()
    with pytest.raises(PlaitError, match="1"):  # the rank that did not come
        parts.save(folder)
    return time.monotonic() - start


@pytest.mark.full
def test_save_by_one_rank_alone_is_an_error(pool: Pool, tmp_path: Path) -> None:
    seconds = pool.run(save_alone, 2, str(tmp_path), timeout=90)
    assert 0 < seconds[0] <= 31
    pool.close()


def counted(group: Any, name: str) -> dict[str, int]:
    """Elements that this rank holds of each parameter."""
    case = CASES[name]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(dist.get_world_size(group)), group)
    return {n: p.numel() for n, p in parts.named_parameters()}


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.sample(2)
def test_no_row_is_lost_or_made(pool: Pool, tp: int) -> None:
    """Each parameter is whole on every rank, or its parts add up to it."""
    name = "b13_vocabulary_does_not_divide"
    whole = {n: p.numel() for n, p in CASES[name].setup().model.named_parameters()}
    held = pool.run(counted, tp, name)
    for parameter, count in whole.items():
        parts = [rank[parameter] for rank in held]
        assert parts == [count] * tp or sum(parts) == count, (parameter, parts, count)
    split = [p for p in whole if held[0][p] < whole[p]]
    assert "emb.weight" in split or "head.weight" in split, held


# -- from the meta device -----------------------------------------------------------------------


def from_meta(group: Any, folder: str, dtype: torch.dtype) -> dict[str, str]:
    """Weights from files; what no file holds is computed again."""
    case = CASES["b54_buffer_in_no_file"]
    setup = case.setup(dtype)
    want, close = reference(case, setup, dtype)
    with torch.device("meta"):
        empty = Setup(Rotated().to(dtype), setup.args, setup.kwargs, setup.loss)
    parts = prove.compiled(case, empty, Mesh(2), group, weights=folder)
    got = prove.run(parts, setup, True)
    demand(discrepancies(got_without_buffers(got, want), want, close), about="from meta")
    return {"out": digest(got.out)}


def got_without_buffers(got: Any, want: Any) -> Any:
    from dataclasses import replace

    return replace(got, buffers=want.buffers)


def demand_alike_or_refused(answers: list[Any]) -> None:
    """All ranks give the same, or all name a buffer that they cannot make."""
    errors = [getattr(a, "error", None) for a in answers]
    if any(errors):
        assert all(isinstance(e, PlaitError) for e in errors), errors
        assert all("inv_freq" in str(e) or "mask" in str(e) for e in errors)
    else:
        prove.alike(answers)


def test_a_buffer_in_no_file_is_made_again_or_refused(pool: Pool, tmp_path: Path) -> None:
    case = CASES["b54_buffer_in_no_file"]
    save_file(dict(case.setup().model.state_dict()), tmp_path / "model.safetensors")
    answers = pool.ask(from_meta, 2, str(tmp_path), torch.float32)
    demand_alike_or_refused(answers)


class RotatedShort(Rotated):
    """Positions by the thousand times fp32 frequencies, before a product in the weights' dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(0, 7000, 1000)[:, None] * self.inv_freq
        return self.fc((x * angle.cos() * self.mask).to(self.fc.weight.dtype))


def short(group: Any, folder: str) -> dict[str, str]:
    """Weights become bf16, buffers do not: a rounded frequency would turn the angles."""
    torch.manual_seed(1)
    x = torch.randn(2, 7, 8)
    with torch.device("meta"):
        empty = RotatedShort()
    parts = plait.compile(
        empty, (x,), tp=2, group=group, weights=folder, dtype=torch.bfloat16, cluster=prove.free(2)
    )
    plain = RotatedShort()
    plain.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    plain.fc.to(torch.bfloat16)
    with torch.no_grad():
        got, want = parts(x), plain(x)
        plain.inv_freq = plain.inv_freq.bfloat16().float()
        rounded = plain(x)
    close = within(2e-2, 2e-2)
    assert differences(rounded, want, "rounded", close), "the test sees no rounding"
    demand(differences(got, want, "out", close), about="bf16")
    return {"out": digest(got)}


def test_buffers_keep_their_dtype_in_a_short_model(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(dict(RotatedShort().state_dict()), tmp_path / "model.safetensors")
    answers = pool.ask(short, 2, str(tmp_path))
    demand_alike_or_refused(answers)


def rows(group: Any, weights: str, dtype: torch.dtype | None) -> dict[str, Any]:
    case = CASES["b55_rows_that_name_themselves"]
    setup = case.setup()
    with torch.device("meta"):
        empty = Setup(
            nn.Sequential(nn.Linear(4, 8, False), nn.Identity(), nn.Linear(8, 4, False)),
            setup.to(dtype or torch.float32).args, setup.kwargs, setup.loss,
        )  # fmt: skip
    parts = prove.compiled(
        case, empty, Mesh(dist.get_world_size(group)), group, weights=weights, dtype=dtype
    )
    state = parts.state_dict()
    own = dict(setup.model.state_dict())
    wanted = {n: t.to(dtype or t.dtype) for n, t in own.items()}
    demand(differences(dict(state), wanted, "state", EXACT), about="rows")
    return {n: p.detach().float().unique().tolist() for n, p in parts.named_parameters()}


@pytest.mark.parametrize(
    ("files", "tp"),
    [(1, 4), (2, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, 2), (2, 4)))],
)
def test_each_rank_reads_its_own_rows(pool: Pool, tmp_path: Path, tp: int, files: int) -> None:
    tensors = dict(CASES["b55_rows_that_name_themselves"].setup().model.state_dict())
    tensors = {n: t.contiguous() for n, t in tensors.items()}
    write(tmp_path, tensors, files)
    held = pool.run(rows, tp, str(tmp_path), None)
    for name in tensors:
        values = [set(rank[name]) for rank in held]
        if values[0] != set(range(8)):  # split: no row twice, none lost
            assert sorted(v for part in values for v in part) == list(range(8)), held


def test_loaded_in_another_dtype(pool: Pool, tmp_path: Path) -> None:
    tensors = dict(CASES["b55_rows_that_name_themselves"].setup().model.state_dict())
    write(tmp_path, {n: t.contiguous() for n, t in tensors.items()}, 1)
    pool.run(rows, 2, str(tmp_path), torch.bfloat16)


def write(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    import json

    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    index = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{i + 1:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, folder / file)
        index[name] = file
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_wrong_key_is_one_error_on_all_ranks(pool: Pool, tmp_path: Path, fault: str) -> None:
    tensors = dict(CASES["b55_rows_that_name_themselves"].setup().model.state_dict())
    tensors = {n: t.contiguous() for n, t in tensors.items()}
    match fault:
        case "missing":
            del tensors["2.weight"]
        case "extra":
            tensors["3.weight"] = torch.ones(2)
        case "shape":
            tensors["2.weight"] = torch.ones(4, 9)
    save_file(tensors, tmp_path / "model.safetensors")
    failures = pool.errors(rows, 2, str(tmp_path), None)
    assert all(isinstance(f.error, plait.errors.WeightError) for f in failures), failures
    assert len({f.message for f in failures}) == 1
    assert ("3.weight" if fault == "extra" else "2.weight") in failures[0].message


# -- as torch asks for it -----------------------------------------------------------------------


def part_of_a_module(group: Any, name: str) -> None:
    """A module around the compiled one saves and loads whole tensors under its own names."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh(2), group)
    outer = nn.ModuleDict({"inner": parts, "more": nn.Linear(2, 2)})
    state = {k: v.clone() for k, v in outer.state_dict().items()}
    plain = nn.ModuleDict({"inner": setup.model, "more": outer["more"]})
    demand(differences(state, dict(plain.state_dict()), "state", EXACT), about=name)
    wanted = {k: v * 2 for k, v in state.items()}
    outer.load_state_dict(wanted)
    demand(differences(dict(outer.state_dict()), wanted, "loaded", EXACT), about=name)
    with pytest.raises(RuntimeError, match=r"Missing.*inner\.fc\.bias"):
        outer.load_state_dict({k: v for k, v in wanted.items() if k != "inner.fc.bias"})


def test_a_compiled_module_is_part_of_another(pool: Pool) -> None:
    pool.run(part_of_a_module, 2, "b14_tied_embedding_and_head")


def loosely(group: Any, name: str) -> None:
    """What is missing and what is too much is told as torch tells it; what fits is loaded."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh(2), group)
    state = {k: v * 2 for k, v in setup.model.state_dict().items() if k != "fc.bias"}
    told = parts.load_state_dict(state | {"other": torch.zeros(1)}, strict=False)
    assert told == setup.model.load_state_dict(state | {"other": torch.zeros(1)}, strict=False)
    demand(differences(dict(parts.state_dict()), dict(setup.model.state_dict()), "state", EXACT))
    with pytest.raises(WeightError, match=r"no tensor of values: fc\.bias is a str"):
        parts.load_state_dict(state | {"fc.bias": "nothing"})


def test_loaded_loosely(pool: Pool) -> None:
    pool.run(loosely, 2, "b14_tied_embedding_and_head")


def unmoved(group: Any, name: str) -> None:
    case = CASES[name]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    for change in (nn.Module.double, nn.Module.bfloat16, lambda module: module.to("meta")):
        with pytest.raises(InputError, match=r"fc\.bias from torch\.float32 on cpu"):
            change(parts)
    for make_copy in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(NotYetError, match="copied or pickled"):
            make_copy(parts)
    demand(differences(dict(parts.float().to("cpu").state_dict()), dict(setup.model.state_dict())))


def test_dtypes_and_devices_stay(pool: Pool) -> None:
    """The programs are for those they were compiled for."""
    pool.run(unmoved, 2, "b14_tied_embedding_and_head")
