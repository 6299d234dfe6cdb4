"""A rank fails, the others wait: every survivor raises, names it, and no process is left.

Each script runs on real processes that may die. What a rank raised is read from the files that it
writes, and the times that count are taken on the survivor.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.api import compile as compile_model
from plait.errors import RankError
from plait.runtime import line
from plait.runtime import watch as watching
from plait.runtime.processes import Crew, Ended, launch
from plait.runtime.watch import Watch
from tests.cases import CASES, Mesh
from tests.gloo import prove
from tests.gloo.harness import Pool

LIMIT = 30.0  # seconds that a survivor may take
START = 120.0  # seconds that processes may take to start on a busy machine
ROOT = Path(__file__).parents[2]
IMPORTS = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def all_reduce(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(8))


def receive(rank: int, size: int) -> None:
    dist.recv(torch.ones(8), src=size - 1)


def send_much(rank: int, size: int) -> None:
    dist.send(torch.ones(64 * 2**20), dst=size - 1)


def subgroup(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(8), group=PARTS[0])


def complain(rank: int) -> None:
    """An exception that the caller catches: the process lives on."""
    time.sleep(0.5)
    raise ValueError("bad input on this rank")


def kill(rank: int) -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(rank: int) -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(rank: int) -> None:
    time.sleep(0.5)
    os._exit(7)


PARTS: list[Any] = []


def scenario(
    group: Any, culprit: int, how: Callable[[int], None], wait: Callable[..., None]
) -> Any:
    """All but the culprit wait in a collective; what each raised, and after how long."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    assert group is dist.group.WORLD
    with Watch(group) as watch:
        if wait is subgroup:
            PARTS.append(dist.new_group(list(range(size))))
            watch.covers(PARTS[0])
        start = time.monotonic()
        with pytest.raises(Exception) as caught, watch.guard("forward"):  # noqa: PT011
            how(rank) if rank == culprit else wait(rank, size)
        took = time.monotonic() - start
        if rank == culprit:
            time.sleep(2)  # it lives on while the others must raise
        with pytest.raises(RankError):  # a failure is not forgotten
            watch.check()
        if rank != culprit:
            with pytest.raises(RankError, match="make another group"):
                Watch(group)
        return took, f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("wait", [all_reduce, receive, send_much, subgroup])
@pytest.mark.sample(2)
def test_an_exception_ends_the_collectives_of_the_others(fresh: Pool, wait: Any) -> None:
    answers = fresh.run(scenario, 4, 3, complain, wait)
    assert answers[3][1] == "ValueError: bad input on this rank"
    for took, text in answers[:3]:
        assert text.startswith("RankError: forward: rank 3 failed: ValueError: bad input on this")
        assert took < 3


@pytest.mark.parametrize(
    ("culprit", "how", "words"),
    [
        (0, kill, "killed by SIGKILL"),  # rank 0 is the middle of the side channel
        (2, segfault, "killed by SIGSEGV"),
        (1, leave, "ended with exit code 7"),
    ],
)
def test_a_death_is_named(fresh: Pool, culprit: int, how: Any, words: str) -> None:
    answers = fresh.ask(scenario, 4, culprit, how, all_reduce)
    assert answers.pop(culprit).kind == "Died"
    for took, text in answers:
        known = f"RankError: forward: rank {culprit} {words} (process "
        # The workers' parent reaps them at once; what is left to read depends on the kernel.
        unknown = f"RankError: forward: rank {culprit} died without a word: killed by a signal"
        assert text.startswith((known, unknown))
        assert took < 4


def killed_alone(folder: str, culprit: int) -> None:
    took, text = scenario(dist.group.WORLD, culprit, kill, all_reduce)
    Path(folder, f"rank-{dist.get_rank()}").write_text(f"{took:.3f} {text}")


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.full), 1])
def test_the_signal_is_named_by_the_survivors_and_the_launcher(
    tmp_path: Path, culprit: int
) -> None:
    with pytest.raises(RankError, match=f"^rank {culprit} of 2 killed by SIGKILL"):
        launch(killed_alone, 2, str(tmp_path), culprit)
    took, text = (tmp_path / f"rank-{1 - culprit}").read_text().split(" ", 1)
    assert text.startswith(f"RankError: forward: rank {culprit} killed by SIGKILL (process ")
    assert float(took) < 4


def fail_alone(culprit: int, when: str) -> None:
    """As a user's script: nothing is caught."""
    watch = Watch()
    with watch.guard("forward"):
        if dist.get_rank() == culprit:
            Path(when).touch()
            raise ValueError("bad input on this rank")
        dist.barrier()


def test_the_launcher_names_the_first_to_fail_and_leaves_no_process(tmp_path: Path) -> None:
    when = tmp_path / "when"
    with pytest.raises(RankError) as caught:
        launch(fail_alone, 3, 1, str(when))
    assert time.time() - when.stat().st_mtime < LIMIT
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 3 raised ValueError: bad input on this rank"
    assert sorted(line[:14] for line in lines[1:3]) == ["  then rank 0 ", "  then rank 2 "]
    assert all("raised RankError: forward: rank 1 failed" in line for line in lines[1:3])
    assert "in fail_alone" in str(caught.value)


class Aborts:
    """Stands for a thread of torch's that lets go of a tensor while the interpreter is taken apart."""

    def __init__(self) -> None:
        self.abort = os.abort

    def __del__(self) -> None:
        self.abort()


def leave_something(folder: str) -> None:
    sys.plait_left = Aborts()  # type: ignore[attr-defined]
    atexit.register(Path(folder, f"rank-{dist.get_rank()}").touch)


@pytest.mark.full
def test_a_worker_that_has_done_its_work_cannot_fail_at_its_end(tmp_path: Path) -> None:
    launch(leave_something, 2, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}


def test_what_all_ranks_refuse_is_said_once_without_a_trace(tmp_path: Path) -> None:
    crew = Crew([11, 12, 13], tmp_path)
    for rank in range(3):
        (tmp_path / f"error-{rank}").write_text("InputError: not with these sizes")
        crew.ended[rank] = Ended(rank, 1 << 8, float(rank))
    with pytest.raises(RankError) as caught:
        crew.judge()
    assert str(caught.value) == "ranks 0, 1, 2 of 3 raised InputError: not with these sizes"


def test_a_mistake_that_one_rank_finds_is_said_once(tmp_path: Path) -> None:
    crew = Crew([11, 12, 13], tmp_path)
    mistake = "CollectiveError: no such algorithm"
    (tmp_path / "error-0").write_text(mistake)
    (tmp_path / "error-1").write_text(f"RankError: plan: rank 0 failed: {mistake}")
    (tmp_path / "error-2").write_text("RankError: plan: ranks 0, 1 did not come")
    for rank in range(3):
        crew.ended[rank] = Ended(rank, 1 << 8, float(rank))
    with pytest.raises(RankError) as caught:
        crew.judge()
    first, *others = str(caught.value).splitlines()
    assert first == f"rank 0 of 3 raised {mistake}"
    assert others == ["  then rank 2 raised RankError: plan: ranks 0, 1 did not come"]


TORCHRUN = """
import sys, time, torch, torch.distributed as dist
from plait.runtime.processes import world
from plait.runtime.watch import Watch
group, ours = world()
assert ours
watch = Watch(group)
if dist.get_rank() == 1 and sys.argv[1] == "outside":
    raise ValueError("outside of every guard")
if dist.get_rank() == 1 and sys.argv[1].startswith("exit"):
    sys.exit(int(sys.argv[1][-1]))
try:
    with watch.guard("forward"):
        dist.barrier()
finally:
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("outside", "forward: rank 1 failed: ValueError: outside of every guard"),
        ("exit 3", "forward: rank 1 ended with exit code 3"),
        pytest.param("exit 0", "forward: rank 1 ended while others worked", marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(1)
def test_under_torchruns_variables(tmp_path: Path, how: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env=IMPORTS | shared | {"RANK": str(r), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    errors = [child.communicate(timeout=START)[1] for child in children]
    assert words in errors[0], errors[0]
    assert children[0].returncode == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def interrupt_me(folder: str) -> None:
    Path(folder, f"pid-{os.getpid()}").touch()
    while True:
        dist.barrier()
        time.sleep(0.01)


INTERRUPT = """
import signal, sys
from plait.runtime.processes import Crew, Ended, launch
from tests.gloo.test_failures import interrupt_me
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if __name__ == "__main__":
    launch(interrupt_me, 2, sys.argv[1])
"""


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, *(pytest.param(s, marks=pytest.mark.full) for s in (signal.SIGTERM, signal.SIGKILL))]
)
def test_no_process_outlives_its_launcher(tmp_path: Path, sign: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=IMPORTS,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, START)
    pids = list(tmp_path.glob("pid-*"))
    if sign is signal.SIGINT:
        os.killpg(parent.pid, sign)  # as Ctrl-C in a terminal
    else:
        parent.send_signal(sign)
    assert parent.wait(LIMIT) != 0
    until(lambda: not any(Path(f"/proc/{p.name[4:]}").exists() for p in pids))


def until(holds: Callable[[], Any], limit: float = LIMIT) -> Any:
    end = time.monotonic() + limit
    while not (value := holds()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


# --- work that all do or none, on the workers of the pool ------------------------------------


def step(group: Any, culprit: int) -> str:
    with Watch(group) as watch:
        rank = dist.get_rank(group)
        try:
            with watch.step("load weights"):
                if rank == culprit:
                    raise OSError("no such file")
        except (OSError, RankError) as error:
            said = f"{type(error).__name__}: {error}"
        dist.all_reduce(torch.ones(1), group=group)  # the group is as good as before
        with watch.step("again"):
            pass
        return said.split(" (process")[0]


def test_a_step_fails_on_all_ranks_and_the_group_lives(pool: Pool) -> None:
    assert pool.run(step, 3, 1) == [
        "RankError: load weights: rank 1 failed: OSError: no such file",
        "OSError: no such file",
        "RankError: load weights: rank 1 failed: OSError: no such file",
    ]


def exchange(group: Any) -> list[Any]:
    with Watch(group) as watch:
        rank = dist.get_rank(group)
        return [watch.exchange("plan", {"rank": rank, "i": i}) for i in range(3)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_exchange_gives_the_value_of_each_rank(pool: Pool, n: int) -> None:
    expected = [[{"rank": r, "i": i} for r in range(n)] for i in range(3)]
    assert pool.run(exchange, n) == [expected] * n


def elsewhere(group: Any) -> str:
    with Watch(group) as watch, pytest.raises(RankError) as caught:
        watch.exchange("save" if dist.get_rank(group) else "forward")
    return str(caught.value)


def test_ranks_at_different_points_are_told_so(pool: Pool) -> None:
    text = 'the ranks are not at the same point: rank 0 at "forward", rank 1 at "save"'
    assert pool.run(elsewhere, 2) == [text] * 2


def absent(group: Any, stay: bool) -> tuple[float, str]:
    rank = dist.get_rank(group)
    with Watch(group) as watch:
        start = time.monotonic()
        if rank == 1:
            if stay:
                time.sleep(3)
            return 0.0, ""
        with pytest.raises(RankError) as caught:
            watch.exchange("save", timeout=1.0)
        return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("stay", [True, False])
def test_who_does_not_come_is_named(fresh: Pool, stay: bool) -> None:
    answers = fresh.run(absent, 3, stay)
    words = (
        "save: rank 1 did not come to it within 1 s" if stay else "save: rank 1 ended before coming"
    )
    for took, text in (answers[0], answers[2]):
        assert text.startswith(words)
        assert took < 2


def own_error(group: Any) -> str:
    """All ranks fail alike: each keeps its own error, which has the better traceback."""

    def fault() -> None:
        dist.barrier(group)
        raise TypeError("a fault of the model")

    with Watch(group) as watch, pytest.raises(TypeError) as caught, watch.guard("forward"):
        fault()
    return str(caught.value)


def test_an_error_of_all_ranks_stays_what_it_is(fresh: Pool) -> None:
    assert fresh.run(own_error, 2) == ["a fault of the model"] * 2


def test_release_spares_a_group_of_one(pool: Pool) -> None:
    pool.run(release_one, 1)


def release_one(group: Any) -> None:
    watching.release(group)
    dist.all_reduce(torch.ones(1), group=group)


def test_a_connection_that_takes_no_more_is_closed() -> None:
    """Half a message was sent: what followed would be read as the rest of it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    theirs.settimeout(5)
    line._send(ours, b"x" * 2**24)
    with ours, theirs:
        while theirs.recv(2**20):
            pass


def test_a_line_that_was_never_written_to_its_end_is_left_out() -> None:
    heard = [line._message(text) for text in b'{"say": "co\n{"say": "failed"}\n'.split(b"\n")]
    assert heard == [None, {"say": "failed"}, None]


def slow_receive(group: Any) -> str:
    """What `release` relies on: gloo's pairs close when a receive times out."""
    if dist.get_rank(group) == 0:
        work = dist.irecv(torch.ones(1), group_src=1, group=group)
        with pytest.raises(RuntimeError):
            group.recv([torch.ones(1)], 1, 77).wait(timedelta(milliseconds=1))
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        return str(caught.value)
    time.sleep(1)
    return ""


def test_gloo_closes_its_pairs_on_a_timeout(fresh: Pool) -> None:
    assert "pair closure" in fresh.run(slow_receive, 2)[0]


# --- the way back ------------------------------------------------------------------------------


def backward(group: Any, mesh: str, how: str) -> str:
    """Rank 1 fails in its backward pass, within the compiled module; what rank 0 raises."""
    case = CASES["b43_chain_of_collectives"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    args, kwargs = setup.inputs()
    loss = setup.loss(parts(*args, **kwargs))
    if dist.get_rank(group) == 1:
        # In a pipeline this rank has the last stage, from which rank 0 waits for gradients.
        out = loss if Mesh.parse(mesh).pp > 1 else list(parts.parameters())[-1]
        out.register_hook(lambda grad: FAILS[how](1))
    try:
        loss.backward()
    except Exception as error:
        if dist.get_rank(group) == 1:
            time.sleep(6)  # it lives on while the other must raise
        return f"{type(error).__name__}: {error}"
    return "nothing"


FAILS: dict[str, Callable[[int], None]] = {"raises": complain, "is killed": kill}


@pytest.mark.parametrize(
    ("mesh", "how"),
    [("tp2", "raises"), ("pp2", "is killed"), pytest.param("tp2", "is killed", marks=pytest.mark.full)],
)
@pytest.mark.sample(1)
def test_a_failure_on_the_way_back_is_named(fresh: Pool, mesh: str, how: str) -> None:
    survivor, culprit = fresh.ask(backward, 2, mesh, how)
    assert isinstance(survivor, str), survivor.traceback
    assert survivor.startswith("RankError: backward: rank 1 "), survivor
    if how == "raises":
        assert culprit == "ValueError: bad input on this rank"
        assert "failed: its backward pass raised" in survivor
    else:
        assert culprit.kind == "Died"


def forgetful(group: Any, mesh: str, culprit: int) -> str:
    """One rank calls forward again where the other calls backward; what each raises."""
    case = CASES["b43_chain_of_collectives"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    args, kwargs = setup.inputs()
    setup.loss(parts(*args, **kwargs)).backward()
    loss = setup.loss(parts(*args, **kwargs))
    try:
        if dist.get_rank(group) == culprit:
            parts(*args, **kwargs)
        else:
            loss.backward()
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("mesh", "culprit"), [pytest.param("tp2", 0, marks=pytest.mark.full), ("pp2", 1)])
def test_a_backward_pass_that_a_rank_leaves_out_is_named(fresh: Pool, mesh: str, culprit: int) -> None:
    for said in fresh.run(forgetful, 2, mesh, culprit):
        assert f"rank {1 - culprit} is in a backward pass that others have not begun: rank {culprit} is at" in said


BACKWARD = """
import sys, torch, torch.distributed as dist, plait
from torch import nn
from tests.gloo.prove import free
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
x = torch.randn(3, 8, requires_grad=True)
compiled = plait.compile(model, (x,), tp=2, training=True, cluster=free(2))
loss = compiled(x).sum()
if dist.get_rank() == 1:
    list(compiled.parameters())[-1].register_hook(lambda grad: 1 / 0)
loss.backward()
"""


def test_an_uncaught_error_on_the_way_back_is_told_with_its_words(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BACKWARD)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env=IMPORTS | shared | {"RANK": str(r), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    errors = [child.communicate(timeout=START)[1] for child in children]
    assert "RankError: backward: rank 1 failed: ZeroDivisionError: division by zero" in errors[0], (
        "\n".join(errors)
    )
    assert [child.returncode for child in children] == [1, 1]


# --- an error that every rank meets ------------------------------------------------------------


class Reads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = torch.nn.Embedding(6, 8), torch.nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.down.weight @ self.table(ids).mT).mT @ self.down.weight)
        return y


def stumbles(group: Any, axis: str, where: str, culprits: tuple[int, ...], times: int) -> list[str]:
    """What a rank raised, one time after the other, and what a good step gave afterwards."""
    torch.manual_seed(0)
    rank, model, ids = dist.get_rank(group), Reads(), torch.tensor([[1, 2, 3]])
    want = torch.autograd.grad(model(ids).sum(), list(model.parameters()))
    mesh = {"tp": 1, "dp": 1, axis: 2}
    compiled = compile_model(model, (ids,), **mesh, training=True, group=group, cluster=prove.free(2))
    raised = []
    for _ in range(times):
        handles = []
        try:
            out = compiled(ids + 9 if where == "forward" and rank in culprits else ids)
            if where == "backward" and rank in culprits:
                handles = [p.register_hook(lambda grad: 1 / 0) for p in compiled.parameters()]
            out.sum().backward()
            raised.append("nothing")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
        for handle in handles:
            handle.remove()
        compiled.zero_grad()
    if len(culprits) == 2:
        time.sleep(2 * watching.UNSAID + 1)  # whatever was to be told is told
        compiled(ids).sum().backward()
        for have, grad in zip(compiled.gradients().values(), want, strict=True):
            torch.testing.assert_close(have, grad)
    return raised


@pytest.mark.parametrize(
    ("axis", "where", "words"),
    [
        ("tp", "forward", "IndexError: index out of range"),
        ("dp", "backward", "ZeroDivisionError"),
        pytest.param("dp", "forward", "IndexError: index out of range", marks=pytest.mark.full),
        pytest.param("tp", "backward", "ZeroDivisionError", marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(1)
def test_an_error_that_every_rank_meets_leaves_the_group_as_it_was(
    pool: Pool, axis: str, where: str, words: str
) -> None:
    for raised in pool.run(stumbles, 2, axis, where, (0, 1), 2):
        assert len(raised) == 2 and all(text.startswith(words) for text in raised), raised


@pytest.mark.full
def test_an_error_that_one_rank_catches_ends_the_group(fresh: Pool) -> None:
    survivor, culprit = fresh.run(stumbles, 2, "tp", "backward", (1,), 1)
    assert survivor[0].startswith("RankError: backward: rank 1 failed: its backward pass raised"), survivor
    assert culprit[0].startswith("ZeroDivisionError"), culprit
