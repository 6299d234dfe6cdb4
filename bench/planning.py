"""How long planning takes: from a model on the meta device to its plan, capture included, imports not.

python bench/planning.py                prints a table; --keep writes bench/results/planning.md
python bench/planning.py --case 8b-tp8  one case in this process, as JSON

Every case runs in a process of its own, for its peak of memory. Times are those of the machine at hand:
let nothing else run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "planning.md"
GIB = 2**30

SMALL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
SMALL |= {"intermediate_size": 14336}
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
LARGE |= {"intermediate_size": 28672}
HOST = {"cluster": "dgx-h100", "tp": 8}
HOSTS = {"cluster": "dgx-h100[8x8]", "tp": "auto", "pp": "auto", "dp": "auto"}
HOSTS |= {"objective": "throughput"}
# name -> (model, what plait.plan is asked, rows, most seconds, most bytes)
CASES: dict[str, tuple[dict[str, int], dict[str, Any], int, float, float]] = {
    "8b-tp8": (SMALL, HOST, 1, 4, 4 * GIB),
    "70b-tp8": (LARGE, HOST, 1, 10, 4 * GIB),
    "70b-64-inference": (LARGE, HOSTS | {"outputs": "last"}, 16, 60, 6 * GIB),
    "70b-64-training": (LARGE, HOSTS | {"training": True}, 16, 60, 6 * GIB),
}


def one(name: str) -> dict[str, Any]:
    here = Path(__file__).parent.resolve()  # other benches must not stand before packages
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    import torch
    import torch._dynamo
    import torch.export._trace
    from transformers import LlamaConfig, LlamaForCausalLM

    import plait
    import plait.capture.export
    import plait.capture.lower

    shape, asked, rows, _, _ = CASES[name]
    config = LlamaConfig(
        **shape, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        rope_theta=500000.0, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.zeros(rows, 4096, dtype=torch.int64)
    before = time.perf_counter(), time.process_time()
    plan = plait.plan(model, kwargs={"input_ids": ids, "use_cache": False}, **asked)
    choice = plan.choice
    return {
        "seconds": time.perf_counter() - before[0],
        "cpu": time.process_time() - before[1],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "weighed": choice.weighed if choice is not None else 1,
        "chosen": choice.winner.name if choice is not None else f"tp={plan.tp}",
        "predicted": plan.seconds,
    }


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(one(asked.case)))
        return
    lines = [
        "| case | seconds (limit) | CPU s | peak GiB (limit) | weighed | chosen | predicted a call |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name in asked.only:
        found, (_, _, _, seconds, memory) = run(name), CASES[name]
        lines.append(
            f"| {name} | {found['seconds']:.1f} ({seconds:.0f}) | {found['cpu']:.1f} "
            f"| {found['peak'] / GIB:.2f} ({memory / GIB:.0f}) | {found['weighed']} "
            f"| {found['chosen']} | {found['predicted'] * 1e3:.1f} ms |"
        )
        print(lines[-1], flush=True)
    if asked.keep:
        RESULTS.write_text("\n".join([*_head(), *lines, ""]))


def _head() -> list[str]:
    import numpy
    import scipy
    import torch
    import transformers

    return [
        "# Planning",
        "",
        "`python bench/planning.py --keep`: Llama-3 shapes on the meta device, 4096 tokens a row, one row",
        "where tp alone is asked for and 16 with all of tp x pp x dp; one process a case.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} x {platform.processor() or platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"scipy {scipy.__version__}, transformers {transformers.__version__}",
        "",
    ]


if __name__ == "__main__":
    main()
