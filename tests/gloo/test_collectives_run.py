"""Collectives run on gloo: every algorithm, uneven parts, dtypes, strides, gradients.

Payloads tell how often each rank's contribution arrived: rank r gives (n+1)^r, so that the digits
of a sum in base n+1 are the counts. In 16 bits, where that does not fit, rank r gives 1 at the
elements e with e % n == r.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait import collectives
from plait.collectives import Schedule, build, names
from plait.collectives.bind import PACK
from plait.collectives.schedule import balanced, offsets
from plait.errors import CollectiveError
from tests.gloo.harness import Pool

NS = [2, 3, 4, 5, 7, 8]
HIERARCHIES = {4: ["hierarchical[2x2: ring, tree]"], 8: ["hierarchical[2x4: one_shot, two_shot]/2"]}


def algorithms(collective: str, n: int) -> list[str]:
    levels = HIERARCHIES.get(n, []) if collective != "all_to_all" else []
    return [*names(collective), "ring/3", "native", *levels]


def contribution(rank: int, n: int, size: int, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 2:
        return torch.full((size,), (n + 1) ** rank, dtype=dtype)
    return (torch.arange(size) % n == rank).to(dtype)


def total(n: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([contribution(r, n, size, dtype) for r in range(n)]).sum(0).to(dtype)


def expect(name: object, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, (name, got.shape, want.shape)
    assert got.dtype == want.dtype, (name, got.dtype)
    assert torch.equal(got, want), (name, got.flatten()[:9], want.flatten()[:9])


# --- every algorithm at every n ------------------------------------------------------------------


def reductions(group: Any, sizes: list[int], dtype: torch.dtype) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for size in sizes:
        mine, want = contribution(rank, n, size, dtype), total(n, size, dtype)
        for name in algorithms("all_reduce", n):
            got = mine.clone()
            assert collectives.all_reduce(got, group, name) is got
            expect(("all_reduce", name, size), got, want)
        for name in algorithms("reduce", n):
            got = collectives.reduce(mine.clone(), n - 1, group, name)
            expect(("reduce", name, size), got, want if rank == n - 1 else mine)
        bounds = offsets(balanced(size, n))
        for name in algorithms("reduce_scatter", n):
            got = collectives.reduce_scatter(mine, None, group, name)
            expect(("reduce_scatter", name, size), got, want[bounds[rank] : bounds[rank + 1]])


def moves(group: Any, sizes: list[int]) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for size in sizes:
        for name in algorithms("broadcast", n):
            got = collectives.broadcast(torch.full((size,), float(rank)), 1, group, name)
            expect(("broadcast", name, size), got, torch.ones(size))
        for name in algorithms("all_gather", n):
            got = collectives.all_gather(torch.full((size,), float(rank)), None, group, name)
            expect(("all_gather", name, size), got, torch.arange(n).repeat_interleave(size).float())
        shares = torch.tensor(balanced(size, n))
        for name in algorithms("all_to_all", n):
            sent = (rank * n + torch.arange(n)).repeat_interleave(shares)
            got = collectives.all_to_all(sent, None, group, name)
            want = torch.arange(n).repeat_interleave(int(shares[rank])) * n + rank
            expect(("all_to_all", name, size), got, want)


DTYPES = [torch.float32, torch.int64, torch.float16, torch.bfloat16]
# Every dtype on four ranks, and in turn on the others: a schedule is the same for all of them.
ARRIVALS = [
    pytest.param(n, dtype, marks=() if n == 4 or i % 4 == k else pytest.mark.full)
    for i, n in enumerate(NS)
    for k, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("n", "dtype"), ARRIVALS)
@pytest.mark.sample(5)
def test_every_contribution_arrives_once(pool: Pool, n: int, dtype: torch.dtype) -> None:
    pool.run(reductions, n, [1, n - 1, n + 1, 1000], dtype)


@pytest.mark.parametrize("n", NS)
def test_everything_gets_where_it_should(pool: Pool, n: int) -> None:
    pool.run(moves, n, [1, n - 1, n + 1, 1000])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", NS)
def test_vectors_that_are_sent_unpacked(pool: Pool, n: int, dtype: torch.dtype) -> None:
    size = n * PACK // dtype.itemsize + 1
    pool.run(reductions, n, [size], dtype)
    pool.run(moves, n, [PACK // 4 + 1])


@pytest.mark.parametrize("n", [2, 4, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 5, 7, 8))])
@pytest.mark.sample(1)
def test_sixty_four_mebibytes(pool: Pool, n: int) -> None:
    for name in ("ring", "two_shot", "halving_doubling", "double_tree", "parameter_server"):
        pool.run(large, n, name, (64 << 20) // 4)


def large(group: Any, name: str, size: int) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    got = collectives.all_reduce(contribution(rank, n, size, torch.float32), group, name)
    assert (got == sum((n + 1) ** r for r in range(n))).all()


def alone(group: Any) -> None:
    x = torch.arange(6.0).view(3, 2)
    for got in (
        collectives.all_reduce(x.clone(), group, "ring"),
        collectives.broadcast(x.clone(), 0, group, "tree"),
        collectives.reduce(x.clone(), 0, group, "native"),
        collectives.all_gather(x, None, group, "ring"),
        collectives.reduce_scatter(x, [3], group, "ring"),
        collectives.all_to_all(x, [[3]], group, "ring"),
        collectives.all_to_all(x, None, group, "native"),
    ):
        expect("alone", got, x)


def test_a_group_of_one(pool: Pool) -> None:
    pool.run(alone, 1)


# --- anything that may be asked ------------------------------------------------------------------


def fuzz(group: Any, seed: int, cases: int) -> None:
    """Random calls, one after the other over the same scratch; every rank knows all inputs."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    random = Random(seed)
    for case in range(cases):
        collective = random.choice(collectives.COLLECTIVES)
        name = random.choice([*names(collective), "native", "ring/5", "two_shot/2"])
        dtype = random.choice([torch.int32, torch.int64, torch.float64, torch.uint8])
        width = random.choice([(), (1,), (3,), (2, 5)])
        most = random.choice([1, 4, 50, 3000])
        root = random.randrange(n)
        made = torch.Generator().manual_seed(random.randrange(1 << 30))

        def values(rows: int) -> Tensor:
            return torch.randint(0, 30, (rows, *width), generator=made).to(dtype)  # noqa: B023

        what = (seed, case, collective, name, dtype, width, most)
        if collective == "all_gather":
            sizes = [random.randrange(most + 1) for _ in range(n)]
            parts = [values(rows) for rows in sizes]
            got = collectives.all_gather(parts[rank], sizes, group, name)
            expect((*what, sizes), got, torch.cat(parts))
        elif collective == "reduce_scatter":
            sizes = [random.randrange(most + 1) for _ in range(n)]
            inputs = [values(sum(sizes)) for _ in range(n)]
            got = collectives.reduce_scatter(inputs[rank], sizes, group, name)
            want = torch.stack(inputs).sum(0).to(dtype).split(sizes)[rank]
            expect((*what, sizes), got, want)
        elif collective == "all_to_all":
            table = [[random.randrange(most + 1) for _ in range(n)] for _ in range(n)]
            inputs = [values(sum(row)).split(row) for row in table]
            got = collectives.all_to_all(torch.cat(inputs[rank]), table, group, name)
            expect((*what, table), got, torch.cat([sent[rank] for sent in inputs]))
        else:
            inputs = [values(most) for _ in range(n)]
            mine = inputs[rank].clone()
            if collective == "broadcast":
                got, want = collectives.broadcast(mine, root, group, name), inputs[root]
            else:
                op = random.choice(["sum", "max", "min"])
                stacked = torch.stack(inputs)
                want = stacked.sum(0) if op == "sum" else getattr(stacked, f"a{op}")(0)
                if collective == "reduce":
                    got = collectives.reduce(mine, root, group, name, op=op)
                    want = want if rank == root else inputs[rank]
                else:
                    got = collectives.all_reduce(mine, group, name, op=op)
            expect(what, got, want.to(dtype))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_random_calls_one_after_the_other(pool: Pool, n: int) -> None:
    pool.run(fuzz, n, n, 120)


# --- bits ----------------------------------------------------------------------------------------


def normal(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(2000, generator=made, dtype=torch.float64)[:size].to(dtype)


def bits(group: Any, name: str, size: int, dtype: torch.dtype) -> bytes:
    got = collectives.all_reduce(normal(dist.get_rank(group), size, dtype), group, name)
    return bytes(got.view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [3, 4])
def test_bits_are_the_same_on_all_ranks(pool: Pool, n: int, dtype: torch.dtype) -> None:
    for name in names("all_reduce"):
        assert len(set(pool.run(bits, n, name, 1001, dtype))) == 1, name


@pytest.mark.parametrize("n", [3, 4])
def test_where_one_rank_adds_bf16_is_rounded_once(pool: Pool, n: int) -> None:
    exact = torch.zeros(1001)
    for rank in range(n):
        exact += normal(rank, 1001, torch.bfloat16)
    once = bytes(exact.to(torch.bfloat16).view(torch.uint8).tolist())
    for name in ("one_shot", "two_shot", "parameter_server", "sharded_server"):
        assert pool.run(bits, n, name, 1001, torch.bfloat16)[0] == once, name
    assert pool.run(bits, n, "ring", 1001, torch.bfloat16)[0] != once


def test_bits_that_do_not_depend_on_the_size(pool: Pool) -> None:
    for name in ("tree", "recursive_doubling", "two_shot", "one_shot"):
        short = pool.run(bits, 4, name, 500, torch.float32)[0]
        assert pool.run(bits, 4, name, 1001, torch.float32)[0].startswith(short), name
    short = pool.run(bits, 4, "ring", 500, torch.float32)[0]
    assert not pool.run(bits, 4, "ring", 1001, torch.float32)[0].startswith(short)


# --- dtypes and strides --------------------------------------------------------------------------


def dtypes(group: Any) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for name in ("ring", "one_shot", "tree", "native"):
        flags = torch.arange(7) == rank
        expect(name, collectives.all_reduce(flags.clone(), group, name), torch.arange(7) < n)
        got = collectives.all_reduce(flags.clone(), group, name, op="min")
        expect(name, got, torch.zeros(7, dtype=torch.bool))
        z = torch.full((5,), complex(rank, 1))
        got = collectives.all_reduce(z.clone(), group, name)
        expect(name, got, torch.full((5,), complex(n * (n - 1) / 2, n)))
        expect(name, collectives.all_gather(z[:2].conj(), None, group, name)[2:4],
               torch.full((2,), complex(1, -1)))  # fmt: skip
        got = collectives.all_gather(
            torch.full((3,), rank).to(torch.float8_e4m3fn), None, group, name
        )
        expect(name, got.float(), torch.arange(n).repeat_interleave(3).float())
        nan = torch.tensor([float("nan") if rank == 0 else 1.0, 2.0])
        assert collectives.all_reduce(nan, group, "ring", op="max").isnan().tolist() == [
            True,
            False,
        ]
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.float64):
        got = collectives.all_reduce(torch.full((9,), rank + 1, dtype=dtype), group, "ring/2")
        expect(dtype, got, torch.full((9,), n * (n + 1) // 2, dtype=dtype))
    collectives.all_reduce(torch.zeros(0, 3), group, "ring")
    assert collectives.all_gather(torch.zeros(2, 0), None, group, "ring").shape == (2 * n, 0)


def test_dtypes(pool: Pool) -> None:
    pool.run(dtypes, 3)


def strides(group: Any) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for name in ("ring", "tree", "native"):
        base = torch.zeros(6, 8)
        view = base.t()[1:6:2]
        view.fill_(float(rank + 1))
        assert collectives.all_reduce(view, group, name) is view
        want = torch.zeros(6, 8)
        want[:, 1:6:2] = n * (n + 1) / 2
        expect((name, "strided"), base, want)  # and nothing beside it was touched
        offset = torch.full((10,), float(rank))[3:7]
        expect((name, "offset"), collectives.broadcast(offset, 1, group, name), torch.ones(4))
        wide = torch.tensor([float(rank)]).expand(3)
        expect((name, "expanded"), collectives.all_gather(wide, None, group, name),
               torch.arange(n).repeat_interleave(3).float())  # fmt: skip
        single = torch.full((1, 2), float(rank))[:, :1]  # contiguous, and two apart
        expect((name, "single"), collectives.all_gather(single, None, group, name), torch.arange(float(n)).view(n, 1))
        plain = torch.arange(float(2 * n)).view(2, n).t()
        got = collectives.reduce_scatter(plain * (rank + 1), [1] * n, group, name)
        expect((name, "transposed"), got, plain[rank : rank + 1] * (n * (n + 1) / 2))
        for shared in (wide, torch.arange(6.0).unfold(0, 3, 1)):
            with pytest.raises(CollectiveError, match=r"share memory .* \.clone\("):
                collectives.all_reduce(shared, group, name)
        expect((name, "untouched"), wide, torch.full((3,), float(rank)))
    x = torch.ones(3)
    version = x._version
    collectives.all_reduce(x, group, "native")
    assert x._version > version


def test_strided_and_expanded_tensors(pool: Pool) -> None:
    pool.run(strides, 3)


# --- groups, choosers, hand-made schedules -------------------------------------------------------


def chosen(group: Any) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    asked = []

    def chooser(collective: str, size: int, ranks: int) -> str:
        asked.append((collective, size, ranks))
        return "two_shot"

    x = torch.full((6, 2), float(rank))
    collectives.all_reduce(x, group, chooser=chooser)
    expect("chosen", x, torch.full((6, 2), n * (n - 1) / 2))
    collectives.all_to_all(torch.ones(n, 2), None, group, "auto", chooser=chooser)
    assert asked == [("all_reduce", 48, n), ("all_to_all", n * 8, n)]
    collectives.all_reduce(torch.ones(3), group)  # without a chooser: native
    schedule = build(f"ring[{n}]/2")
    collectives.all_reduce(torch.ones(3), group, schedule)
    mine = Schedule("all_reduce", n, schedule.chunks, schedule.steps)  # one that no spelling names
    expect(
        "hand-made", collectives.all_reduce(torch.ones(9), group, mine), torch.full((9,), float(n))
    )


def test_who_chooses(pool: Pool) -> None:
    pool.run(chosen, 3)


def crossed(group: Any) -> None:
    """Two groups of a world of four, in an order of ranks that is not the world's."""
    rank = dist.get_rank(group)
    odd = dist.new_group([1, 3])
    outer = dist.new_group([3, 0])
    x = torch.tensor([float(rank)])
    if rank in (1, 3):
        collectives.all_reduce(x, odd, "ring")
        assert x.item() == 4
    if rank in (0, 3):
        y = torch.tensor([float(10 + rank)])
        collectives.broadcast(y, 1, outer, "tree")  # root: a rank of the group
        assert y.item() == 10 + dist.get_global_rank(outer, 1)
    if rank == 2:
        with pytest.raises(CollectiveError, match="rank 2 is not in the group"):
            collectives.all_reduce(x, odd, "ring")


def test_subgroups(pool: Pool) -> None:
    pool.close()  # whose world has four ranks
    pool.run(crossed, 4)


# --- gradients -----------------------------------------------------------------------------------


def gradients(group: Any, name: str) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    weight = torch.arange(1.0, n + 1)  # the loss of rank r weighs what it sees by r + 1
    everybody = float(weight.sum())

    x = torch.full((4, 2), float(rank), requires_grad=True)
    y = collectives.all_reduce(x, group, name)
    expect("left alone", x.detach(), torch.full((4, 2), float(rank)))
    (y * weight[rank]).sum().backward()  # an expanded gradient
    expect("all_reduce", x.grad, torch.full((4, 2), everybody))

    sizes = [r % 3 for r in range(n)]
    x = torch.ones(sizes[rank], 2, requires_grad=True)
    y = collectives.all_gather(x, sizes, group, name)
    (y * torch.arange(float(len(y)))[:, None] * weight[rank]).sum().backward()
    at = torch.arange(float(sum(sizes))).split(sizes)[rank]
    expect("all_gather", x.grad, (at * everybody)[:, None].expand(-1, 2))

    x = torch.ones(n + 1, 2, requires_grad=True)
    y = collectives.reduce_scatter(x, None, group, name)
    (y * weight[rank]).sum().backward()
    want = weight.repeat_interleave(torch.tensor(balanced(n + 1, n)))
    expect("reduce_scatter", x.grad, want[:, None].expand(-1, 2))

    x = torch.ones(3, requires_grad=True)
    (collectives.broadcast(x, 1, group, name) * weight[rank]).sum().backward()
    expect("broadcast", x.grad, torch.full((3,), everybody if rank == 1 else 0.0))

    x = torch.ones(3, requires_grad=True)
    (collectives.reduce(x, 1, group, name) * weight[rank]).sum().backward()
    expect("reduce", x.grad, torch.full((3,), 2.0))

    moving = name if name != "tree" else "two_shot"
    table = [[(s + 2 * d) % 3 for d in range(n)] for s in range(n)]
    x = torch.ones(sum(table[rank]), requires_grad=True)
    (collectives.all_to_all(x, table, group, moving) * weight[rank]).sum().backward()
    expect("all_to_all", x.grad, weight.repeat_interleave(torch.tensor(table[rank])))


@pytest.mark.parametrize("name", ["ring", "tree", "native"])
def test_gradients_are_those_of_the_sum_of_all_losses(pool: Pool, name: str) -> None:
    pool.run(gradients, 3, name)


def second_order(group: Any) -> None:
    x = torch.tensor([2.0], requires_grad=True)
    y = collectives.all_reduce(x**3, group, "ring")
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert slope.item() == 2 * 3 * 2.0**2
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert bend.item() == 2 * 6 * 2.0
    with pytest.raises(CollectiveError, match="only a sum has a gradient, not 'max'"):
        collectives.all_reduce(x, group, "ring", op="max")


def test_gradients_have_gradients(pool: Pool) -> None:
    pool.run(second_order, 2)
