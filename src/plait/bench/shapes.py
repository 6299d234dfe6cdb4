"""Shapes: a decoder by its widths, as transformers' unmodified class; and a part of one.

`--share 1/8` on two ranks is what two of eight ranks do: heads, key/value heads and the width of the
feed-forward are divided so that each rank holds an eighth of the layer. The hidden size stays, and
with it the size of every transfer.

The vocabulary is tiny: what is measured is layers, a few of the many of a full model, which its
embedding and its logits would outweigh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.errors import InputError
from plait.models import Example

VOCABULARY = 64


@dataclass(frozen=True)
class Shape:
    """Widths of one layer; `groups` key/value heads, `dim` of a head."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    dim: int

    def share(self, part: int, ranks: int) -> Shape:
        """The widths of `ranks` shares, each 1/`part` of the layer."""
        wanted = {n: getattr(self, n) * ranks for n in ("heads", "groups", "ffn")}
        uneven = [f"{n} {getattr(self, n)}" for n, size in wanted.items() if size % part]
        if uneven or ranks > part:
            fits = ", ".join(f"1/{p}" for p in range(ranks, self.groups * ranks + 1) if self._fits(p, ranks))
            why = f"{', '.join(uneven)} do not divide" if uneven else f"{ranks} ranks hold more than the layer"
            raise InputError(f"--share 1/{part} on {ranks} ranks: {why}; these fit: {fits}")
        parts = {n: size // part for n, size in wanted.items()}
        return Shape(self.hidden, dim=self.dim, **parts)

    def _fits(self, part: int, ranks: int) -> bool:
        return not any(x * ranks % part for x in (self.heads, self.groups, self.ffn))

    def config(self, layers: int, tokens: int) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.dim,
            max_position_embeddings=max(tokens, 2048),
            use_cache=False,
            tie_word_embeddings=False,
        )


def named(name: str) -> Shape:
    """InputError, with the names there are, for one that is not."""
    if name not in SHAPES:
        raise InputError(f"--shape {name}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def example(
    shape: Shape, layers: int, tokens: int, train: bool, device: torch.device, dtype: torch.dtype
) -> Example:
    """The model with the same random weights on every rank, and a call of `tokens` tokens."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(shape.config(layers, tokens)).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    kwargs |= {"labels": ids.flip(1)} if train else {}
    return Example(model, kwargs=kwargs)


# hidden, ffn, heads, groups, dim: of the models' published configurations; `tiny` is for a CPU.
SHAPES = {
    "tiny": Shape(256, 704, 8, 4, 32),
    "smollm2-135m": Shape(576, 1536, 9, 3, 64),
    "llama-1b": Shape(2048, 8192, 32, 8, 64),
    "llama-8b": Shape(4096, 14336, 32, 8, 128),
    "llama-70b": Shape(8192, 28672, 64, 8, 128),
    "llama-405b": Shape(16384, 53248, 128, 8, 128),
}
