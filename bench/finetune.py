"""SmolLM2-135M fine-tuned on a text: the losses of every mesh beside those of one process.

    python bench/finetune.py                         one process, then every mesh of MESHES; writes results/finetune.md
    python bench/finetune.py --model pkg.module:fn   another model that `plait run` takes, for a trial

The text is the description of an installed package, in windows of tokens; the rows of a batch have unequal
numbers of labels. A rank passes the whole batch, or with replicas the rows of its own; the loss is the
mean over all labels of the batch. Both sides use torch's own AdamW, in the weights' own float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.resolve()  # other benches must not stand before packages
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]

import torch
import torch.distributed as dist
from torch import Tensor

import plait
from plait import models
from plait.runtime.processes import launch

MESHES = ((1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2))  # tp, pp, dp
RESULTS = HERE / "results"
RTOL = 1e-3


@dataclass(frozen=True)
class Job:
    model: models.Resolved
    steps: int = 20
    rows: int = 4
    length: int = 32
    rate: float = 1e-4
    text: str = "torch"  # a package: its own description

    def batches(self) -> list[dict[str, Tensor]]:
        """Row r of a batch has labels for its first (r + 1) / rows tokens."""
        text = str(metadata(self.text).get_payload())
        if self.model.kind == "folder":
            ids = models.tokenizer(self.model)(text).input_ids
        else:
            ids = [ord(c) % 64 for c in text]
        need = self.steps * self.rows * self.length
        ids = (ids * (need // len(ids) + 1))[:need]
        tokens = torch.tensor(ids).view(self.steps, self.rows, self.length)
        labels = tokens.clone()
        for row in range(self.rows):
            labels[:, row, (row + 1) * self.length // self.rows :] = -100
        return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def alone(job: Job) -> list[float]:
    """One process, the plain module."""
    model = models.whole(job.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate)
    losses = []
    for batch in job.batches():
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rank(job: Job, mesh: tuple[int, int, int], file: str) -> None:
    """One rank of a mesh; the first writes the losses into `file`."""
    torch.set_num_threads(1)
    tp, pp, dp = mesh
    batches = job.batches()
    mine = [slice(r * job.rows // dp, (r + 1) * job.rows // dp) for r in range(dp)]
    example = models.build(job.model)
    compiled = plait.compile(
        example.model, (), {**_rows(batches[0], mine[0]), "use_cache": False}, tp=tp, pp=pp, dp=dp,
        weights=example.weights, training=True, **({"micro_batches": 2} if pp > 1 else {}),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=job.rate)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = compiled.step(**_rows(batch, mine[compiled.replica]), use_cache=False)
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        told = [line for line in compiled.explain().splitlines() if line.startswith("step: ")]
        Path(file).write_text(json.dumps({"losses": losses, "step": told}))


def _rows(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: x[rows] for name, x in batch.items()}


def compared(job: Job, meshes: Any = MESHES) -> dict[str, Any]:
    """The losses of one process and of every mesh, and how far apart they are."""
    want = alone(job)
    print(f"one process: from {want[0]:.4f} to {want[-1]:.4f}", flush=True)
    found: dict[str, Any] = {"one process": {"losses": want}}
    for mesh in meshes:
        tp, pp, dp = mesh
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "losses.json"
            launch(rank, tp * pp * dp, job, mesh, str(file))
            got = json.loads(file.read_text())
        apart = max(abs(a - b) / abs(b) for a, b in zip(got["losses"], want, strict=True))
        found[f"tp={tp} pp={pp} dp={dp}"] = {**got, "apart": apart}
        print(f"tp={tp} pp={pp} dp={dp}: at most {apart:.1e} apart; {got['losses'][-1]:.4f}", flush=True)
    return found


def table(found: dict[str, Any], job: Job) -> str:
    names = list(found)
    lines = [
        "# Fine-tuning: the losses of every mesh beside one process",
        "",
        f"{job.model.name}, AdamW, rate {job.rate:g}, {job.steps} steps of {job.rows} x {job.length} tokens of "
        f"the description of the package {job.text}; labels for 1/4 to 4/4 of a row. gloo, float32, torch "
        f"{torch.__version__}. `python bench/finetune.py` makes this file.",
        "",
        "| step | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for i in range(job.steps):
        lines.append(f"| {i} | " + " | ".join(f"{found[n]['losses'][i]:.6f}" for n in names) + " |")
    apart = ["", *(f"{found[n]['apart']:.1e}" for n in names[1:])]
    lines += ["| most apart, relative |" + " | ".join(apart) + " |", ""]
    lines += [f"- {n}: {found[n]['step'][0]}" for n in names if found[n].get("step")]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    job = Job(models.resolve(asked.model), steps=asked.steps)
    found = compared(job)
    if asked.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "finetune.md").write_text(table(found, job))
        told = {"job": asdict(job) | {"model": job.model.name}, "found": found}
        (RESULTS / "finetune.json").write_text(json.dumps(told, indent=1) + "\n")
    wrong = [n for n, f in found.items() if f.get("apart", 0.0) > RTOL]
    if wrong:
        raise SystemExit(f"further apart than {RTOL:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
