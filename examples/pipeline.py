"""A stage a rank, four micro-batches, and a run that stops and goes on from its checkpoint.

    torchrun --nproc-per-node 2 examples/pipeline.py
"""

import copy
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import plait

torch.manual_seed(0)  # the same weights and data on every rank
vocabulary, width = 50, 32
layers = [nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))
ids = torch.randint(vocabulary, (8, 12))
labels = ids.masked_fill(torch.rand(8, 12) < 0.5, -100)  # which do not count, and differ from row to row


def score(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(module: plait.Compiled, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = module.step(ids, target=labels, loss_fn=score)  # forward and backward, by the schedule
        plait.clip_grad_norm_(module, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


compiled = plait.compile(model, (ids,), tp=1, micro_batches=4, schedule="1f1b", training=True)
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
losses = train(compiled, optimizer, 2)

# The loss is that of the whole batch: a mean over as many labels as count in it.
reference = copy.deepcopy(model)
torch.testing.assert_close(losses[0], score(reference(ids), labels).item())

# Every rank writes its own rows; another mesh reads the rows that it needs: here a part of every layer.
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
compiled.save(folder[0], optimizer)
again = plait.compile(model, (ids,), pp=1, training=True)
resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
again.load(folder[0], resumed)
on, over = train(compiled, optimizer, 2), train(again, resumed, 2)
torch.testing.assert_close(on, over)

if dist.get_rank() == 0:
    print("in stages:   ", *(f"{loss:.4f}" for loss in losses + on))
    print(f"then tp={again.plan.tp}:   ", *(f"{loss:.4f}" for loss in losses + over))
    print(compiled.explain())
