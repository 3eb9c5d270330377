"""Gradients of the methods side by side: how far each is from a reference gradient, and what it costs.

reference, _ = gradient(model, input_ids, Backprop())
found, _ = gradient(model, input_ids, Truncated(window=256))
compare(reference, found)["overall"]["overall"].relative_error
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from adjoint.errors import UserError
from adjoint.memory import PeakMemory, memory_left
from adjoint.methods import METHODS, Backprop, Method, check_window
from adjoint.stack import Stack
from adjoint.tools.measure.passes import synchronize
from adjoint.train.machine import autocast

_PROBE = 256  # tokens of the passes that warm up and that measure what a token keeps
# The backward's workspaces come on top of what the forward keeps, and the estimate is from few tokens.
_SHARE_OF_MEMORY = 0.4

NamedGradients = dict[str, Tensor]
Window = int | Literal["auto"] | None  # tokens, picked a layer, or the whole sequence


def window_order(window: Window) -> tuple[Any, ...]:
    """Return a key to sort windows by: tokens, then None, the whole sequence, then "auto"."""
    return window == "auto", window is None, window or 0


class Agreement(NamedTuple):
    """The agreement of a gradient g with the reference r.

    Attributes:
        cosine: g·r / (|g| |r|); None where either is zero or not finite.
        relative_error: |g − r| / |r| in the L2 norm; None where r alone is zero, or something is not finite.
    """

    cosine: float | None
    relative_error: float | None


# -------------------------------------------------------------------------------------------------- gradients


def gradient(
    model: nn.Module, input_ids: Tensor, method: Method, precision: str = "float32"
) -> tuple[NamedGradients, list[int] | None]:
    """Return the gradient of the mean loss by parameter name, and the windows that the method picked, one per
    layer.

    Leaves `.grad` None, and a model of transformers wrapped by the method.

    Args:
        model: a `Stack`, or a causal LM of transformers.
        input_ids: (batch, seqlen) int64; the labels are the same ids, which the model shifts.
        method: an object of `adjoint.methods`.
        precision: as `adjoint.train.machine.autocast` takes it.
    """
    model.zero_grad(set_to_none=True)
    with autocast(precision, input_ids.device):
        loss, windows = _loss(model, input_ids, method)
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in _named_parameters(model)
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return gradients, windows


def _loss(model: nn.Module, input_ids: Tensor, method: Method) -> tuple[Tensor, list[int] | None]:
    """Return the mean loss of a batch by a method, and the windows that the method picked."""
    if isinstance(model, Stack):
        output = model(input_ids, labels=input_ids, method=method)
        return output.loss, output.windows
    from adjoint.hf.model_parts import contained_model
    from adjoint.hf.wrap import wrap
    from adjoint.hf.wrap_state import wrap_state_or_original

    if wrap_state_or_original(contained_model(model)).method != method:
        wrap(model, method)  # which compares gradients again on first use
    return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss, None


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a model's parameters, named as those of a `Stack`: layers.0.…, lm_head.weight."""
    if isinstance(model, Stack):
        yield from model.named_parameters()
        return
    from adjoint.hf.model_parts import backbone_of, contained_model, layers_of

    backbone = backbone_of(contained_model(model))
    path = next(path for path, module in model.named_modules() if module is backbone)
    prefix = f"{path}." if path else ""
    layers = {f"{prefix}{layer}.": f"layers.{k}." for k, layer in enumerate(layers_of(backbone))}
    for name, parameter in model.named_parameters():
        start = next((layer for layer in layers if name.startswith(layer)), prefix)
        yield layers.get(start, "") + name.removeprefix(start), parameter


def compare(
    reference: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, dict[str, Agreement]]:
    """Agreement by scope ("overall", "layer", "kind") and by name within it.

    Layers are "layers.0", …, and what is outside them by its own name: embedding, norm_f, lm_head. Kinds are
    parameters of one name over all layers: A_log, D, conv1d (weight and bias), mlp.fc1, … Sums are in
    float64.
    """
    sums: dict[str, dict[str, Tensor]] = {"overall": {}, "layer": {}, "kind": {}}
    for name, r in reference.items():
        g, r = gradients[name].double().flatten(), r.to(gradients[name].device).double().flatten()
        d = g - r
        products = torch.stack([g @ r, g @ g, r @ r, d @ d]).cpu()
        in_layer = re.match(r"layers\.\d+", name)
        layer = in_layer[0] if in_layer else name.partition(".")[0]
        kind = re.sub(r"^layers\.\d+\.(mixer\.)?|\.(weight|bias)$", "", name)
        for scope, name_in_scope in (("overall", "overall"), ("layer", layer), ("kind", kind)):
            sums[scope][name_in_scope] = sums[scope].get(name_in_scope, 0) + products
    return {
        scope: {name_in_scope: _agreement(*products.tolist()) for name_in_scope, products in parts.items()}
        for scope, parts in sums.items()
    }


def _agreement(dot: float, squared_norm: float, reference: float, difference: float) -> Agreement:
    if not all(map(math.isfinite, (dot, squared_norm, reference, difference))):
        return Agreement(None, None)
    error = math.sqrt(difference / reference) if reference else None if difference else 0.0
    return Agreement(dot / math.sqrt(squared_norm * reference) if squared_norm and reference else None, error)


def _mean(agreements: Sequence[Agreement]) -> dict[str, float | None]:
    """Means by the fields of `Agreement`; None where one of the values is None."""
    columns = zip(Agreement._fields, zip(*agreements, strict=True), strict=True)
    return {name: None if None in values else statistics.fmean(values) for name, values in columns}


# ---------------------------------------------------------------------------------------------------- methods


def takes(name: str, argument: str) -> bool:
    """Whether the method has this argument: "window", and "tolerance" if it can pick its windows."""
    return argument in METHODS[name].__dataclass_fields__


def build(
    name: str, window: Window, seqlen: int, chunk_size: int | None, tolerance: float | None = None
) -> Method:
    """Return the method `name` with a window (None: all of seqlen), a chunk size and the tolerance of window
    "auto", where it takes them."""
    values: dict[str, Any] = {"window": seqlen if window is None else window, "chunk_size": chunk_size}
    values |= {"tolerance": tolerance} if window == "auto" else {}
    return METHODS[name](**{key: value for key, value in values.items() if takes(name, key)})


def counted_vjps(name: str, windows: Sequence[int | None], seqlen: int) -> int | None:
    """Return the vjps of the paper's Algorithm 4 with these windows, one a layer (None: all of seqlen),
    counted once for the whole batch; None for backprop. Here products that share a token are added up before
    they are differentiated: 3 × seqlen × n_layer vjps, whatever the window.
    """
    if name == Backprop.name:
        return None
    return sum(2 * truncated_products(seqlen, window) + seqlen for window in windows)


def truncated_products(seqlen: int, window: int | None = None) -> int:
    """Pairs (t, i) with t - window < i <= t: the vjps of 𝒜, and as many of ℬ, in one layer (section 4.3).

    window * seqlen - window (window - 1) / 2, which is seqlen (seqlen + 1) / 2 for the whole sequence. The
    paper prints a plus; the sums of its eq. 7 count up to the minus, and so does the 64% that it says are
    saved.

    Raises:
        ValueError: seqlen or window is not a whole number, 1 or more.
    """
    if seqlen < 1:
        raise ValueError(f"seqlen must be a whole number, 1 or more; got {seqlen!r}")
    check_window(seqlen if window is None else window)
    window = seqlen if window is None else min(window, seqlen)
    return window * seqlen - window * (window - 1) // 2


def backprop_fits(model: nn.Module, input_ids: Tensor) -> bool:
    """Whether plain backpropagation over input_ids is expected to fit in the memory that is left.

    What the forward keeps is measured on a short piece and scaled: linear in seqlen for these layers.
    """
    piece, saved_bytes = input_ids[:, :_PROBE], dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = _loss(model, piece, Backprop())
    for parameter in model.parameters():
        saved_bytes.pop(parameter.untyped_storage().data_ptr(), None)
    needed = sum(saved_bytes.values()) / piece.shape[1] * input_ids.shape[1]
    return needed < _SHARE_OF_MEMORY * memory_left(input_ids.device)


# ------------------------------------------------------------------------------------------------ measurement


@dataclasses.dataclass
class Comparison:
    """A model and batches on which methods are compared with a reference gradient.

    The reference gradients, one a batch, are made when first needed and stay in host memory.

    Args:
        model: a `Stack`, or a causal LM of transformers in evaluation mode, on the device to measure on.
        batches: (batch, seqlen) int64 each, on the CPU, all of one shape.
        baseline: the name of the method whose gradient is the reference: "backprop" or "exact".
        chunk_size: of the methods that take one; None lets them pick.
        precision: "float32", "float64" or "bfloat16".
        tolerance: of window "auto"; None is that method's own default.
    """

    model: nn.Module
    batches: Sequence[Tensor]
    baseline: str = "backprop"
    chunk_size: int | None = None
    precision: str = "float32"
    tolerance: float | None = None

    def __post_init__(self) -> None:
        self.device, self.seqlen = next(self.model.parameters()).device, self.batches[0].shape[1]
        self._references: list[NamedGradients] = []

    def row(self, name: str, window: Window) -> dict[str, Any]:
        """Measure one method with one window (None: all) on every batch.

        Returns:
            JSON's types only: method, window, baseline, windows (a layer's each, the longest of the batches',
            where the method picked them; else None), cosine and relative_error (means over the batches),
            relative_error_of_batches, layer and kind (name → cosine, relative_error), vjps (None of a wrapped
            model), seconds (of forward + backward, median), peak_memory_bytes (largest; None where it cannot
            be measured).

        Raises:
            UserError: the reference gradient is not finite, so that there is nothing to compare with.
        """
        reference = name == self.baseline
        method = build(name, window, self.seqlen, None if reference else self.chunk_size, self.tolerance)
        if not reference and not self._references:
            baseline = build(self.baseline, None, self.seqlen, None)
            self._references = [self._checked(self._gradient(ids, baseline)[0]) for ids in self.batches]
        self._gradient(self.batches[0][:, :_PROBE], method)  # loads and compiles
        gc.collect()  # cycles of earlier rows would come free in the middle of a measurement
        agreements: list[dict[str, dict[str, Agreement]]] = []
        seconds: list[float] = []
        peaks: list[Any] = []
        picked: list[int] | None = None
        for i, batch in enumerate(self.batches):
            ids = batch.to(self.device)
            with PeakMemory(self.device) as peak:
                synchronize(self.device)
                started = time.perf_counter()
                gradients, windows = self._gradient(ids, method)
                synchronize(self.device)
                seconds.append(time.perf_counter() - started)
            peaks.append(peak.bytes)
            if windows is not None:
                picked = list(map(max, picked or windows, windows))
            if reference and len(self._references) <= i:
                self._references.append(self._checked(gradients))
            agreements.append(compare(self._references[i], gradients))
            del gradients  # its memory is not the next measurement's
        means = {
            scope: {name: _mean([a[scope][name] for a in agreements]) for name in names}
            for scope, names in agreements[0].items()
        }
        vjps = None
        if isinstance(self.model, Stack):
            full_reach: list[int | None] = [None if window == "auto" else window] * self.model.config.n_layer
            vjps = counted_vjps(name, picked or full_reach, self.seqlen)
        return {
            "method": name,
            "window": window,
            "baseline": self.baseline,
            "windows": picked,
            **means["overall"]["overall"],
            "relative_error_of_batches": [a["overall"]["overall"].relative_error for a in agreements],
            "layer": means["layer"],
            "kind": means["kind"],
            "vjps": vjps,
            "seconds": statistics.median(seconds),
            "peak_memory_bytes": None if None in peaks else max(peaks),
        }

    def _gradient(self, ids: Tensor, method: Method) -> tuple[NamedGradients, list[int] | None]:
        return gradient(self.model, ids.to(self.device), method, self.precision)

    def _checked(self, gradients: NamedGradients) -> NamedGradients:
        """Return a reference gradient in host memory; raise UserError if it is not finite."""
        for name, g in gradients.items():
            if not torch.isfinite(g).all():
                raise UserError(
                    f"the gradient of {name} by {self.baseline} is not finite on this data: "
                    "sweep a model that has not diverged, or set --training.precision float32"
                )
        return {name: g.cpu() for name, g in gradients.items()}
