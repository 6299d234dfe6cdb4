"""`plait run`, on each rank: compile, answer or call, then the same by one process, and the table.

Until generation with a cache is part of the compiler, an answer is made by running the growing
prefix through one program of dynamic length, greedily.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait import models
from plait.api import compile as compile_model
from plait.report.tables import Outcome, run_table, show
from plait.runtime.compiled import Compiled

REPEATS = 5  # calls of which the median time counts


@dataclass(frozen=True)
class Request:
    """What the user asked of `plait run`; plain data, sent to every worker."""

    model: models.Resolved
    prompt: str | None
    max_tokens: int
    algorithm: str
    pp: int = 1
    dp: int = 1  # replicas: all of them answer the same


@dataclass(frozen=True)
class Answer:
    """Tokens, and the seconds that each took."""

    tokens: list[int]
    seconds: list[float]


def run(request: Request) -> None:
    """One rank of `plait run`; rank 0 speaks."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about torch's own
    outcome = _answer(request) if request.prompt is not None else _call(request)
    if dist.get_rank() == 0:
        show(run_table(outcome))
    if not outcome.same:
        raise SystemExit(1)


def greedy(
    model: Callable[..., Any],
    ids: Tensor,
    stop: set[int],
    limit: int,
    say: Callable[[Sequence[int]], None] = lambda tokens: None,
) -> Answer:
    """The likeliest next token, again and again; `say` is told all tokens after each."""
    tokens: list[int] = []
    seconds = []
    while len(tokens) < limit and (not tokens or tokens[-1] not in stop):
        start = time.perf_counter()
        logits = model(input_ids=ids, use_cache=False).logits
        token = logits[:, -1].argmax(-1)
        seconds.append(time.perf_counter() - start)
        tokens.append(int(token))
        ids = torch.cat([ids, token[:, None]], 1)
        say(tokens)
    return Answer(tokens, seconds)


def _answer(request: Request) -> Outcome:
    tokenizer = models.tokenizer(request.model)
    assert request.prompt is not None
    ids = models.encode(tokenizer, request.prompt)
    stop = models.stop_tokens(request.model, tokenizer)
    example = models.build(request.model, length=ids.size(1), dynamic=True)
    compiled = _compile(example, request)
    with torch.no_grad():
        ours = greedy(compiled, ids, stop, request.max_tokens, _speaker(tokenizer))
        if dist.get_rank() == 0:
            print(flush=True)  # the answer's line ends
        theirs = _alone(
            request, lambda model: greedy(model, ids, stop, request.max_tokens), (ours, 0)
        )
    alone, memory = theirs
    return Outcome(
        model=request.model.name,
        plan=compiled.plan,
        memory=_gathered(_stored(compiled)),
        memory_alone=memory,
        seconds=_middle(ours.seconds),
        seconds_alone=_middle(alone.seconds),
        unit="token",
        same=_equal_everywhere(ours.tokens, alone.tokens),
        claim="same tokens as the unsharded model",
        detail=_first_difference(ours.tokens, alone.tokens),
    )


def _call(request: Request) -> Outcome:
    example = models.build(request.model)
    compiled = _compile(example, request)
    with torch.no_grad():
        outputs, seconds = _timed(compiled, example)
        theirs, memory = _alone(request, lambda m: _timed(m, example), ((outputs, 0.0), 0))
    worst, fits = _compare(outputs, theirs[0])
    return Outcome(
        model=request.model.name,
        plan=compiled.plan,
        memory=_gathered(_stored(compiled)),
        memory_alone=memory,
        seconds=seconds,
        seconds_alone=theirs[1],
        unit="call",
        same=_equal_everywhere(fits, True),
        claim="same outputs as the unsharded model",
        detail=f"largest difference {worst:.1e}",
    )


def _compile(example: models.Example, request: Request) -> Compiled:
    _stage(f"compiling {request.model.name} for {dist.get_world_size()} ranks")
    return compile_model(
        example.model,
        example.args,
        example.kwargs,
        dynamic=example.dynamic,
        weights=example.weights,
        algorithm=request.algorithm,
        pp=request.pp,
        dp=request.dp,
    )


def _alone(
    request: Request, work: Callable[[nn.Module], Any], otherwise: tuple[Any, int]
) -> tuple[Any, int]:
    """The unsharded model on rank 0, with every core of this host, while the others wait."""
    result = otherwise
    _stage("the same by one process, for comparison")
    if dist.get_rank() == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = models.whole(request.model)
        result = work(model), _stored(model)
        torch.set_num_threads(threads)
    dist.barrier()
    return result


def _timed(model: nn.Module, example: models.Example) -> tuple[Any, float]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        outputs = model(*example.args, **example.kwargs)
        seconds.append(time.perf_counter() - start)
    return outputs, _middle(seconds)


def _stage(text: str) -> None:
    """What takes a while is said before it starts, beside the output."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _speaker(tokenizer: Any) -> Callable[[Sequence[int]], None]:
    """Prints what each token adds to the text, on rank 0."""
    said = ""

    def say(tokens: Sequence[int]) -> None:
        nonlocal said
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if dist.get_rank() == 0 and not text.endswith("\ufffd"):  # half a character waits
            print(text[len(said) :], end="", flush=True)
            said = text

    return say


# --- comparing ------------------------------------------------------------------------------


def _stored(model: nn.Module) -> int:
    """Bytes of the storages of parameters and buffers, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def _gathered(value: int) -> list[int]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _equal_everywhere(ours: Any, theirs: Any) -> bool:
    """Whether every rank has what the unsharded model (on rank 0) gave."""
    told: list[Any] = [theirs]
    dist.broadcast_object_list(told, src=0)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, ours)
    return all(value == told[0] for value in values)


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return "" if len(ours) == len(theirs) else f"{len(ours)} tokens, not {len(theirs)}"
    return f"token {at} is {ours[at]}, not {theirs[at]}"


def _compare(ours: Any, theirs: Any) -> tuple[float, bool]:
    worst, fits = 0.0, True
    for a, b in zip(_tensors(ours), _tensors(theirs), strict=True):
        worst = max(worst, float((a.double() - b.double()).abs().max()) if a.numel() else 0.0)
        fits = fits and models.close(a.double(), b.double())
    return worst, fits


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _middle(values: Sequence[float]) -> float:
    """The median; the first call, which warms up, does not count where there are others."""
    rest = sorted(values[1:] or values)
    return rest[len(rest) // 2]
