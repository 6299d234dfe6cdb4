"""Recall: plans that were made before, so that the second start of a job plans nothing.

    PLAIT_PLAN_CACHE or CACHE/plait/plans, and in it KEY.json      empty: plans are kept nowhere

A key is of all that a plan is made of: the program (its graph, shapes, constants and weights), what was
asked, the described cluster, torch, plait's own sources, and the host where something was measured. Rank 0
looks, and tells all ranks what it found; that every rank has the program of the plan, and the same plan, is
compared as for any other (program.py `compared`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import plait
from plait.cluster.stored import cache_folder
from plait.errors import PlanError
from plait.plan import joint
from plait.plan.plan import Plan
from plait.program import Program
from plait.runtime.agree import Agreement

MOST = 256  # plans that are kept; one has 10 to 500 KB


@dataclass(frozen=True)
class Recall:
    """Where this job's plan is kept; None: nowhere, as a plan that was `given` is the user's to keep."""

    agreement: Agreement
    given: Plan | None
    path: Path | None

    @classmethod
    def of(
        cls, given: Plan | None, program: Program, ask: joint.Ask, measure: bool, agreement: Agreement
    ) -> Recall:
        folder = os.environ.get("PLAIT_PLAN_CACHE")
        if given is not None or folder == "" or not agreement.leads:
            return cls(agreement, given, None)
        where = Path(folder) if folder is not None else cache_folder() / "plans"
        made_of = (
            program.digest, repr(ask), str(measure), platform.node() if measure else "",
            torch.__version__, _sources(),
        )  # fmt: skip
        return cls(agreement, given, where / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.json")

    def plan(self) -> Plan | None:
        """The plan that was given, or the one that was kept; the same on every rank."""
        if self.given is not None:
            return self.given
        text = self.agreement.broadcast("plan", self._read())
        return Plan.from_json(text) if text else None

    def _read(self) -> str:
        """Nothing of a file that is not there, not whole, or of another version."""
        with contextlib.suppress(OSError, PlanError, ValueError):
            if self.path is not None:
                text = self.path.read_text()
                Plan.from_json(text)
                os.utime(self.path)  # it was of use
                return text
        return ""

    def keep(self, plan: Plan) -> None:
        """A folder that cannot be written keeps nothing: the next start plans again."""
        if self.path is None or self.path.exists():
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(f".{os.getpid()}")
            fresh.write_text(plan.to_json())
            fresh.replace(self.path)
            for old in sorted(self.path.parent.glob("*.json"), key=_used)[:-MOST]:
                old.unlink(missing_ok=True)


def _used(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@functools.cache
def _sources() -> str:
    """Of every file of this package: a rule or a price that changed makes other plans."""
    root = Path(plait.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
