"""The operations as the kernels' tests go through them: the fuzzer's tensors and loops, at fixed sizes.

Triton decides when it is imported whether kernels are interpreted. In a process with TRITON_INTERPRET=1 the
one backend of these tests is therefore Triton's, in any other it is not among them. `test_triton_interpret`
starts the former.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels import dispatch, plain_recurrence
from adjoint.kernels.operation import all_operations, registered
from tests.fuzz.operators import SHAPES, WINDOWED, Case, by_operation, leaves
from tests.model_helpers import relative

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else [n for n in ("reference", "cpu") if dispatch.why_not(n) is None]
# Those that are operators of ours, attention and the head's loss aside.
OPERATIONS = [name for name in SHAPES if not name.startswith(("past", "causal_a", "grouped", "linear_cross"))]
OF_EACH_TOKEN = ("rms_norm", "swiglu")  # which know neither order nor documents
SCANS = [name for name in OPERATIONS if name.endswith(WINDOWED)]
BARE: Case = {
    "softplus": False,
    "silu": False,
    "documents": None,
    "bare": True,
}  # without all that is optional


def mend_interpreter() -> None:
    """Work around three faults of Triton's interpreter.

    Triton 3.6 makes ints of arrays of one element, which NumPy 2.4 refuses. Triton 3.9 gives the result of a
    comparison of scalars the type of what was compared, and so refuses the mask `block & (scalar < stop)`.
    All releases replace the whole language again at each call of a function in a kernel, and look up NumPy's
    types in a table that they make each time: a third of the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor_and_index

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, given: Any) -> Any:
        made = splat(self, kind, given)
        made.data = made.data.astype(given.data.dtype)
        return made

    InterpreterBuilder.create_splat = create_splat

    patch_lang = interpreter._patch_lang

    def patch_lang_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch_lang(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang_once
    numpy_type, compound = interpreter._get_np_dtype, (tl.pointer_type, tl.block_type)
    of_numbers = functools.cache(numpy_type)
    interpreter._get_np_dtype = lambda kind: (numpy_type if isinstance(kind, compound) else of_numbers)(kind)


if INTERPRETED:
    mend_interpreter()


def cut_sequences(monkeypatch: pytest.MonkeyPatch, pieces: str | int, split: int = 8) -> None:
    """Cut sequences into more pieces than their lengths ask for.

    Args:
        pieces: "small" ones in every kernel, "split" as for a big device, "blocks" of channels that two
            programs share, or the tokens of an SSD chunk.
        split: tokens of a split, with "blocks".

    Triton code that splits the sequence says how in the constants SHORTEST_SPLIT and UNIT of its module.
    """
    monkeypatch.setattr(plain_recurrence, "SEGMENT", 12)
    monkeypatch.setattr(plain_recurrence, "STRETCH", 4)
    if not INTERPRETED:
        return
    from adjoint.kernels.selective_scan.triton import launch as selective
    from adjoint.kernels.selective_scan.triton import saved_states as selective_states
    from adjoint.kernels.ssd_scan.triton import launch as ssd
    from adjoint.kernels.ssd_scan.triton import saved_states as ssd_states
    from adjoint.kernels.triton import common

    if isinstance(pieces, int):
        monkeypatch.setattr(ssd_states, "CHUNK", dict.fromkeys((2, 4, 8), pieces))
        return
    if pieces == "blocks":
        monkeypatch.setattr(selective_states, "CHECKPOINT", 4)
        monkeypatch.setattr(selective, "backward_programs", lambda *sizes: (2, split))
        return
    monkeypatch.setattr(common, "programs_that_fill", lambda x, per_multiprocessor: 10**6)
    code_by_operation = (operation.backends.get("triton") for operation in all_operations().values())
    for module in {importlib.import_module(code.module) for code in code_by_operation if code is not None}:
        if hasattr(module, "SHORTEST_SPLIT"):
            monkeypatch.setattr(module, "SHORTEST_SPLIT", 1)
        if pieces == "small" and hasattr(module, "UNIT"):
            monkeypatch.setattr(module, "UNIT", 8)
    if pieces == "small":
        monkeypatch.setattr(selective_states, "CHECKPOINT", 8)
        monkeypatch.setattr(ssd_states, "CHUNK", dict.fromkeys((2, 4, 8), 32))
        monkeypatch.setattr(ssd_states, "TILE", dict.fromkeys((2, 4, 8), 16))
        monkeypatch.setattr(ssd, "HEADS_EACH", 2)


def has_kernel(operation: str, backend: str) -> bool:
    """Whether a backend has its own code for the operation, and does not leave it to the reference."""
    name = registered_name(operation)
    return dispatch.implementation(name, backend, torch.device("cpu"), torch.float32) == backend


def takes_case(case: Case, backend: str) -> bool:
    """Whether a backend's own code takes the case's window and halo."""
    code = registered(registered_name(case["operation"])).backends.get(backend)
    return code is None or code.takes_windows or not (case.get("window") or case.get("halo"))


def registered_name(operation: str) -> str:
    """The name of the record that one of OPERATIONS belongs to."""
    return operation.replace("dense linear", "dense").split()[-1]


def optional(operation: str) -> list[str]:
    return [name for name, dims in SHAPES[operation].items() if dims.endswith("?")]


def of_tokens(operation: str) -> list[str]:
    """The tensors that have a value for each token."""
    return [name for name, dims in SHAPES[operation].items() if dims.startswith("b s")]


def make_case(operation: str, seqlen: int, **more: Any) -> Case:
    """A case of the fuzzer, every optional tensor given; smaller where programs run one by one."""
    sizes = {"b": 1, "g": 1} if INTERPRETED else {"b": 2, "g": 2}
    sizes |= {"d": 5, "h": 2, "n": 4, "w": 4, "p": 0}
    case = {"operation": operation, "seqlen": seqlen, "seed": seqlen, "documents": 0.1, **sizes, **more}
    case = {"softplus": True, "silu": True, **case}
    return {**case, "absent": optional(operation)} if case.pop("bare", False) else case


def rows(operation: str, seqlen: int, **more: Any) -> Case:
    """A case whose tensors of tokens lie among NaN; of all others every second number is read."""
    shapes = SHAPES[operation]
    layouts = {name: "surrounded" if name in of_tokens(operation) else "sliced" for name in shapes}
    return make_case(operation, seqlen, layouts=layouts, **more)


def tensors_of(case: Case) -> dict[str, Tensor]:
    """The case's tensors as leaves, strides included."""
    generator = torch.Generator().manual_seed(case["seed"])
    rand = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    made, views = leaves(case, rand)
    return {name: views[name](t).detach().requires_grad_() for name, t in made.items()}


def run(case: Case, tensors: Mapping[str, Tensor], seq_idx: Tensor | None = None) -> tuple[Tensor, ...]:
    """The public function, with the options that the case names; a tuple of outputs."""
    return tuple(by_operation(case["operation"], case, dict(tensors), seq_idx, torch.empty(0)))


def numbered(lengths: list[int], batch: int) -> Tensor:
    """Documents of these lengths, (batch, seqlen)."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(batch, -1)


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative L2 error of every tensor, absolute where it should be zero."""
    assert got.keys() == expected.keys()
    for name, b in expected.items():
        assert got[name].shape == b.shape, name
        distance, size = (got[name].double() - b).norm().item(), b.norm().item()
        assert distance <= tolerance * (size or 1.0), f"{name}: {distance / (size or 1.0):.1e}"


def assert_no_worse(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor]
) -> None:
    """CCE's rule: the error against float64 is at most that of autograd in the same 16-bit dtype."""
    for name, b in exact.items():
        ours, theirs = relative(got[name].double(), b), relative(rounded[name].double(), b)
        assert ours <= theirs, f"{name}: {ours:.1e}, not {theirs:.1e}"


def run_interpreted(*arguments: str) -> str:
    """What a Python process with these arguments prints, Triton's kernels interpreted in it."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
