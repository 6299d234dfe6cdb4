"""`plait run` and `plait verify` as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
IMPORTS = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
LIMIT = 300  # seconds, on a busy machine
COMMAND = "from plait.cli import main\nif __name__ == '__main__': main()\n"


def plait(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A script, since the workers import the main module again."""
    script = folder / "plait_command.py"
    script.write_text(COMMAND)
    return subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=IMPORTS,
        timeout=LIMIT,
    )


def tiny(folder: Path) -> None:
    """A language model with 3 query heads over one key/value head, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate([*"abcdefgh", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=4, eos_token_id=8,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def test_run_answers_and_shows_what_it_did(tmp_path: Path) -> None:
    tiny(tmp_path / "tiny")
    done = plait(tmp_path, "run", "tiny", "--nproc", "2", "--prompt", "a b c", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "same tokens as the unsharded model: yes" in shown
    assert "tiny on 2 processes" in shown
    assert "model.layers.*.mlp.up_proj.weight dim 0 in 2 equal parts 2" in shown
    assert "sent by rank" in shown
    assert "compiling tiny for 2 ranks" in done.stderr
    assert "Warning" not in done.stderr


MODULE = """
import torch
from torch import nn
def f():
    net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    nn.init.normal_(net[2].bias, std=3.0)
    return net, (torch.randn(4, 5),)
def data_dependent():
    class Net(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Net(), (torch.randn(4),)
"""


@pytest.mark.parametrize(
    ("name", "dp", "code", "words"),
    [
        ("f", 1, 0, "5 compared on each of 2 ranks, 0 different"),
        pytest.param("f", 2, 0, "5 compared on each of 2 ranks, 0 different", marks=pytest.mark.full),
        pytest.param("data_dependent", 1, 1, "raised CaptureError", marks=pytest.mark.full),
    ],
)
def test_verify_compares_or_says_why_not(tmp_path: Path, name: str, dp: int, code: int, words: str) -> None:
    (tmp_path / "verified.py").write_text(MODULE)
    done = plait(tmp_path, "verify", f"verified:{name}", "--nproc", "2", "--dp", str(dp))
    assert done.returncode == code, done.stderr
    assert words in (done.stderr if code else done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run_as_they_stand(name: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / name)], capture_output=True, text=True, env=IMPORTS, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
