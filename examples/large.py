"""A model that no rank ever holds whole: planned without its weights, then loaded by rows.

    torchrun --nproc-per-node 2 examples/large.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import plait


class Model(nn.Module):
    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


with torch.device("meta"):  # shapes and names, no memory
    model = Model()
x = torch.randn(2, 16, 512, generator=torch.Generator().manual_seed(1))

plan = plait.plan(model, (x,), cluster="dgx-h100", tp=8, pp=1)  # of a machine that is not here

# Somebody has written the weights: here the first process, elsewhere a checkpoint that was downloaded.
dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
if dist.get_rank() == 0:
    torch.manual_seed(0)
    whole = Model()
    save_file(whole.state_dict(), Path(folder[0]) / "model.safetensors")
dist.barrier()

compiled = plait.compile(model, (x,), pp=1, weights=folder[0])  # each rank reads its own rows
out = compiled(x)
if dist.get_rank() == 0:
    torch.testing.assert_close(out, whole(x), rtol=1e-4, atol=1e-5)
    print(f"on dgx-h100 at tp=8, {plan.seconds * 1e6:.0f} us a call are predicted")
    held = sum(p.numel() for p in compiled.parameters())
    print(f"here rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,}")
dist.destroy_process_group()
