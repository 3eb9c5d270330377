"""What README.md and docs/ show, by which command it was measured, and whether the code has changed since."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from adjoint.files import write_atomically
from adjoint.tools.measure.process import ROOT
from benchmarks.bidirectional import Bidirectional
from benchmarks.budgets import Budgets
from benchmarks.chained_calls import ChainedCalls
from benchmarks.checkpoints import Checkpoints
from benchmarks.convergence.command import Convergence
from benchmarks.digits import Digits
from benchmarks.fsdp import Fsdp
from benchmarks.host_weights import HostWeights
from benchmarks.hyena import Hyena
from benchmarks.kernels.command import Kernels
from benchmarks.layer_local import LayerLocalCosine
from benchmarks.long_prompts import LongPrompts
from benchmarks.memory import Memory
from benchmarks.mixers import Mixers
from benchmarks.quantized import Quantized
from benchmarks.recall import Recall
from benchmarks.report import Row
from benchmarks.rows_on_ranks import RowsOnRanks
from benchmarks.runner import RESULTS, RUNS, Benchmark
from benchmarks.sequence import Sequence
from benchmarks.sequence_memory import SequenceMemory
from benchmarks.shared_prefixes import SharedPrefixes
from benchmarks.sources import Sources
from benchmarks.wrapped import Wrapped
from benchmarks.wrapped_length import WrappedLength
from benchmarks.zero import Zero


class Figure(NamedTuple):
    """A table, a picture or numbers in documents.

    Attributes:
        shown: in which documents.
        options: of the benchmark's command; with `--out` if its results have a folder of their own.
        quick: options of a try in seconds; None if another figure tries the same benchmark.
        measures: the files of adjoint/ whose change makes the results old, as `Path.glob` takes them. None
            of what a model learns, as that depends on the gradients, which tests hold.
    """

    shown: str
    benchmark: Benchmark
    options: str
    quick: str | None
    measures: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the folder of the stored results."""
        words = self.options.split()
        return ROOT / words[words.index("--out") + 1] if "--out" in words else RESULTS

    def command(self, quick: bool = False) -> str:
        """Return the command that measures and publishes it, or with `quick` one that tries its benchmark."""
        flags = f"{self.quick} --out {RUNS / 'quick'}" if quick else f"{self.options} --publish"
        return " ".join(["python -m", f"benchmarks.{self.benchmark.name}", *flags.split()])

    @property
    def file(self) -> Path:
        """The published result; there is none where it has not been measured yet."""
        return self.folder / f"{self.benchmark.name}.json"

    def stored(self) -> Row:
        """The published result."""
        result: Row = json.loads(self.file.read_text())
        return result

    def note_changes(self) -> None:
        """Write into the stored result which packages that it measures have changed since, for the line
        below its tables; where git does not know its commit, leave the result as it is."""
        result = self.stored()
        try:
            changed = sorted({_package_of(path) for path in self.changed()})
        except LookupError:
            return
        if changed != result["environment"].get("changed", []):
            result["environment"]["changed"] = changed
            write_atomically(self.file, json.dumps(result, indent=1) + "\n")

    def changed(self) -> list[str]:
        """Files it measures whose `code` is not what it was then. Raises LookupError where git does not know
        the commit."""
        commit = self.stored()["environment"]["commit"].rstrip("+")
        tracked = subprocess.run(
            ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, check=False, capture_output=True
        )
        if tracked.returncode:
            raise LookupError(f"git does not have commit {commit}")
        paths = {path for pattern in self.measures for path in (ROOT / "adjoint").glob(pattern)}
        return [
            path.relative_to(ROOT).as_posix()
            for path in sorted(paths)
            if code(path.suffix, path.read_text()) != code(path.suffix, _at(commit, path))
        ]


def code(suffix: str, text: str) -> str:
    """A file's text without comments and docstrings, the same for the same code.

    Of imports the names count, not the modules: a function that moves computes what it did."""
    if suffix != ".py":
        return "".join(re.sub(r"//.*|/\*.*?\*/", "", text).split())
    tree = ast.parse(text)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            imports = [line for line in body if isinstance(line, ast.Import | ast.ImportFrom)]
            imported.update(ast.dump(alias) for line in imports for alias in line.names)
            body[:] = [line for line in body if line not in imports]
    return "\n".join([ast.dump(tree), *sorted(imported)])


def _package_of(path: str) -> str:
    """The package or module of adjoint/ that a file belongs to, as `adjoint.kernels` or `adjoint.loss`."""
    return ".".join(Path(path).with_suffix("").parts[:2])


def _at(commit: str, path: Path) -> str:
    """A file as it was; nothing where it was not there."""
    shown = subprocess.run(
        ["git", "show", f"{commit}:{path.relative_to(ROOT).as_posix()}"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    return "" if shown.returncode else shown.stdout


ENGINE = ("engine/executor.py", "engine/storage.py", "engine/tile.py")
SCANS = ("kernels/cpu/*.cpp", "kernels/cpu/*.h")
WRAPPED = (*ENGINE, *SCANS, "hf/stage.py", "hf/cache.py", "hf/head.py")
STACK = (*ENGINE, *SCANS, "engine/chunk_size.py")
BINOMIAL = (*STACK, "engine/binomial.py", "engine/schedule.py")
FIGURES = [
    Figure("README.md, docs/results.md", Wrapped(), "",
           "--lengths 1K 2K --repeats 1 --repeat-s 0", WRAPPED),
    Figure("README.md, docs/results.md", WrappedLength(), "", "--lengths 1K 2K --repeat-s 0", WRAPPED),
    Figure("docs/which_layout.md", Fsdp(), "", "--lengths 256 --models Mamba-2",
           (*WRAPPED, "parallel/fsdp.py")),
    Figure("docs/which_layout.md", RowsOnRanks(), "",
           "--models Llama --documents 4 --answers 2 --prompt 512 --passes 1",
           (*WRAPPED, "engine/turns.py", "engine/shared_prefix.py", "parallel/fsdp.py")),
    Figure("docs/which_layout.md", Zero(), "", None, (*WRAPPED, "parallel/fsdp.py", "parallel/zero.py")),
    Figure("docs/results.md", Memory(), "",
           "--lengths 512 1K --methods exact backprop --repeats 1 --repeat-s 0 --allocators default", STACK),
    Figure("docs/results.md", Memory(), "--methods exact --lengths 16384 262144 --allocators default "
           "--out benchmarks/results/exact-growth", None, STACK),
    Figure("docs/results.md", Kernels(), "", "--size small --op selective_scan --repeats 1",
           SCANS),
    Figure("docs/kernels.md", Digits(), "", "--ops rms_norm --lengths 1K", SCANS),
    Figure("docs/results.md", Kernels(), "--peers --out benchmarks/results/avx2", None, SCANS),
    Figure("docs/results.md", Kernels(), "--peers --out benchmarks/results/avx512", None, SCANS),
    Figure("docs/results.md", Wrapped(), "--lengths 16384 --ways transformers wrapped --repeats 1 "
           "--out benchmarks/results/avx2", None, WRAPPED),
    Figure("docs/results.md", Wrapped(), "--lengths 16384 --ways transformers wrapped --repeats 1 "
           "--out benchmarks/results/avx512", None, WRAPPED),
    Figure("docs/which_method.md", Budgets(), "", "--lengths 1K --repeats 1", (*ENGINE, *SCANS)),
    Figure("docs/which_method.md", Checkpoints(), "", "--lengths 1K 2K",
           BINOMIAL),
    Figure("docs/results.md", Checkpoints(), "--model mamba --ways all 32 --lengths 16777216 67108864 "
           "--allocators jemalloc --out benchmarks/results/sixty-four-million", None, BINOMIAL),
    Figure("docs/which_method.md", Mixers(), "", "--lengths 512 --rounds 1 --repeats 1", (*ENGINE, *SCANS)),
    Figure("docs/convergence.md", Convergence(), "",
           "--methods backprop exact --tasks text --seeds 1 --steps 5 --seqlen 128"),
    Figure("docs/convergence.md", Recall(), "", "--mixers mamba gated_deltanet --steps 20"),
    Figure("docs/which_layout.md", Sequence(), "", "--lengths 4K --workers 1 2 --repeats 1",
           ("parallel/context.py", "parallel/kv.py", "parallel/handoff.py", "plan/rounds.py")),
    Figure("docs/which_layout.md", SequenceMemory(), "", "--length 4K --workers 1 2",
           ("parallel/context.py", "parallel/kv.py", "engine/storage.py")),
    Figure("docs/paper.md", LayerLocalCosine(), "", ""),
    Figure("docs/paper.md", Sources(), "", "--tables figure-1 --lengths 4K",
           ("plan/stage_memory.py", "plan/run_memory.py", "loss.py", "layers/*.py")),
    Figure("docs/host_weights.md", HostWeights(), "", "--models Bamba-9B --tokens 128K",
           ("plan/host_traffic.py", "plan/estimate.py", "plan/run_memory.py")),
    Figure("docs/recipes.md", ChainedCalls(), "", "--calls 1 2 --length 1K", (*WRAPPED, "engine/step.py")),
    Figure("docs/recipes.md", SharedPrefixes(), "", "--models Stack --answers 2 --ratios 1 --passes 1",
           (*WRAPPED, "engine/shared_prefix.py", "kernels/attention/*.py")),
    Figure("docs/recipes.md", LongPrompts(), "", None, (*WRAPPED, "engine/shared_prefix.py")),
    Figure("docs/finetune.md", Quantized(), "", None, (*WRAPPED, "hf/quantized.py")),
    Figure("docs/which_method.md", Bidirectional(), "", "--lengths 2K --repeats 1 --repeat-s 0",
           (*STACK, "stack/bidirectional.py", "stack/recurrence.py")),
    Figure("docs/kernels.md", Hyena(), "", "--lengths 2K --repeats 1 --repeat-s 0",
           (*STACK, "layers/hyena.py")),
]  # fmt: skip
