"""Number of our own functions that a call of a wrapped model runs, once its first use is over.

A call of a Python function costs about 0.1 µs in itself and rarely comes alone: what is asked once per model
must not be asked at every call, chunk and layer. `python -m tests.hf.test_call_counts` lists the calls by
function."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint
from adjoint.kernels.ssd_scan import ssd_scan

PACKAGE = str(Path(adjoint.__file__).parent) + "/"
HF = PACKAGE + "hf/"
CHUNKS = 4


class CallCounts:
    """Calls of functions of our package that a function makes.

    Attributes:
        calls: number of calls by code object.
        kernel_frames: our own frames above the kernel's public function, at most.
    """

    def __init__(self, function: Callable[[], object], kernel: CodeType) -> None:
        self.calls: collections.Counter[CodeType] = collections.Counter()
        self.kernel_frames = 0

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                self.calls[frame.f_code] += 1
                if frame.f_code is kernel:
                    self.kernel_frames = max(self.kernel_frames, own_frames(frame.f_back))

        gc.collect()  # what others have left has finalizers of ours, which are not the function's calls
        gc.disable()
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(before)
            gc.enable()

    def total(self, folder: str = PACKAGE) -> int:
        """Return the number of calls of functions in a folder."""
        return sum(n for code, n in self.calls.items() if code.co_filename.startswith(folder))

    def files(self, folder: str = PACKAGE) -> set[str]:
        """Return the files of the functions that were called."""
        names = {code.co_filename for code in self.calls}
        return {name.removeprefix(PACKAGE) for name in names if name.startswith(folder)}


def own_frames(frame: FrameType | None) -> int:
    """Return the number of frames of our package from `frame` upwards."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


def second_step() -> tuple[CallCounts, CallCounts]:
    """Return what the second forward and backward of a Mamba-2 of two layers in four chunks call."""
    torch.manual_seed(0)
    config = Mamba2Config(
        num_hidden_layers=2,
        hidden_size=64,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        vocab_size=128,
        chunk_size=16,
    )
    model = adjoint.wrap(Mamba2ForCausalLM(config), adjoint.Exact(chunk_size=32))
    ids = torch.randint(0, 128, (1, 32 * CHUNKS))
    model(input_ids=ids, labels=ids).loss.backward()
    losses: list[torch.Tensor] = []
    forward = CallCounts(lambda: losses.append(model(input_ids=ids, labels=ids).loss), ssd_scan.__code__)
    return forward, CallCounts(losses[0].backward, ssd_scan.__code__)


def test_a_second_step_asks_what_is_new() -> None:
    """Before these bounds a forward had 5,341 calls, 2,693 of them in hf/, and 27 frames above the kernel.

    A chunk has some 215 of them, half of these for the nine kernels that it runs."""
    forward, backward = second_step()
    assert forward.total(HF) <= 388
    assert forward.total() <= 1170
    assert len(forward.files(HF)) <= 15
    assert len(forward.files()) <= 42
    assert forward.kernel_frames <= 23
    assert backward.total(HF) <= 184
    assert backward.total() <= 1840  # 39 of them add a vector, compensated; 130 place gradients of columns


def print_counts(counts: CallCounts) -> None:
    """Print the calls by folder and by function."""
    print(f"{counts.total():,} calls in {len(counts.files())} files; {counts.kernel_frames} frames of ours")
    print(f"of these in hf/: {counts.total(HF):,} in {len(counts.files(HF))}")
    for folder in sorted({name.split("/")[0] for name in counts.files()}):
        print(f"  {counts.total(PACKAGE + folder):6,} {folder}")
    for code, number in counts.calls.most_common():
        print(f"{number:6,} {code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}")


if __name__ == "__main__":
    for direction, counts in zip(("forward", "backward"), second_step(), strict=True):
        print(f"---- {direction}")
        print_counts(counts)
