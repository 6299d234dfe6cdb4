"""A model split over local processes: called, then trained, with the results of the unsharded one.

    torchrun --nproc-per-node 2 examples/quickstart.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

import plait


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)  # the same weights and data on every rank
model = nn.Sequential(*(Block(64) for _ in range(3)))
x, target = torch.randn(2, 8, 64, 64).unbind(0)

# Nothing in the model says how it is split; the group is made from torchrun's variables.
compiled = plait.compile(model, args=(x,), training=True)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))

# Training is a loop as ever. The model that was compiled is not touched: here it is the reference.
reference = copy.deepcopy(model)
optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, reference)]
for step in range(3):
    losses = []
    for module, optimizer in zip((compiled, reference), optimizers, strict=True):
        loss = nn.functional.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {losses[0]:.6f}, unsharded {losses[1]:.6f}")

state = compiled.state_dict()  # whole tensors, the model's names; a collective
if dist.get_rank() == 0:
    torch.testing.assert_close(state, dict(reference.state_dict()))
    held = sum(p.numel() for p in compiled.parameters())
    print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    print(compiled.explain())
