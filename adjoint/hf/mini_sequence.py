"""The Mini-Sequence Transformer (Luo et al. 2024, arXiv 2407.15892) for models of transformers.

MLPs run piece by piece, head and loss slice by slice, and layers are recomputed in the backward. See
`adjoint.MiniSequence`. All of it is plain autograd over the model's own code: for the time of a call the
layers and their MLPs get other forwards. So hooks, sharding and adapters see the same calls as without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.host_weights import fetched
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.verification import alike
from adjoint.hf import check
from adjoint.hf.call import HEAD_ARGUMENTS, Call, CallKind
from adjoint.hf.chunk_context import WithoutCheckpointing
from adjoint.hf.head import LogitTerms, custom_loss_function, run_checkpointed, summed_loss
from adjoint.hf.loss_terms import LogitPenalty
from adjoint.hf.model_parts import Forward, backbone_of, layers_of, replaced_forwards
from adjoint.hf.verify.loss_trial import refuse_unsummable_loss
from adjoint.hf.verify.trial_copy import example_tokens, in_eval_mode
from adjoint.hf.verify.trial_gradients import example_inputs
from adjoint.methods import Pieces
from adjoint.parallel.access import weights_type


def total_loss(call: Call, pieces: Pieces, mlps: Sequence[str]) -> Tensor:
    """Return the summed loss of a call with labels.

    Args:
        mlps: names from `find_token_wise_mlps`.

    Raises:
        Refused: the model's loss is not known to be a sum over tokens.
    """
    model, targets = call.model, call.targets
    if (loss_function := custom_loss_function(model)) is not None:
        refuse_unsummable_loss(call, loss_function, padded=False)
    penalty = LogitPenalty.from_call(call, padded=False) if check.has_logit_penalty(model) else None
    inputs = {k: v for k, v in call.arguments.items() if v is not None and k not in HEAD_ARGUMENTS}
    with splitting(backbone_of(model), mlps, pieces.mlps):
        hidden = backbone_of(model)(**inputs, use_cache=False)[0]
    terms = LogitTerms(penalty=None if penalty is None else penalty.of_sum(call.divisor))
    with fetched(model.get_output_embeddings()):
        return summed_loss(model, hidden, targets.to(hidden.device), terms, pieces.head)


@contextlib.contextmanager
def splitting(backbone: nn.Module, mlps: Sequence[str], chunks: int) -> Iterator[None]:
    """Recompute the backbone's layers in the backward and run its `mlps` in pieces, for the time of the
    context.

    The recomputation comes after this context has ended, so each layer's forward splits the MLPs inside it
    itself."""
    named_mlps = [(name, backbone.get_submodule(name)) for name in mlps]
    layers = layers_of(backbone)
    forwards = {
        layer: _recomputed_forward(
            layer, [mlp for mlp_name, mlp in named_mlps if mlp_name.startswith(f"{name}.")], chunks
        )
        for name, layer in layers.items()
    }
    with replaced_forwards(forwards):
        yield


def _recomputed_forward(layer: nn.Module, mlps: Sequence[nn.Module], chunks: int) -> Forward:
    """Return a layer's forward that the backward runs again, with the layer's MLPs in pieces."""
    forward, without_checkpointing = layer.forward, WithoutCheckpointing(layer)
    split_forwards = {mlp: in_pieces(mlp.forward, chunks) for mlp in mlps} if chunks > 1 else {}

    def run(*args: object, **kwargs: object) -> object:
        with contextlib.ExitStack() as stack:
            # Else the layer, or layers inside it as Zamba has them, would be checkpointed twice.
            stack.enter_context(without_checkpointing())
            stack.enter_context(replaced_forwards(split_forwards))
            return forward(*args, **kwargs)

    return lambda *args, **kwargs: run_checkpointed(functools.partial(run, **kwargs), *args)


def in_pieces(forward: Callable[[Tensor], Tensor], chunks: int) -> Callable[[Tensor], Tensor]:
    """Return a forward that runs `chunks` pieces of the tokens one after another, (batch, tokens, hidden)
    → the same."""

    def piece(x: Tensor) -> Tensor:
        """Run a piece. Autocast casts weights for each again: gradients of one cast would be summed in its
        dtype."""
        uses_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(x.contiguous())  # copied in here, so that the checkpoint keeps a view alone
        finally:
            torch.set_autocast_cache_enabled(uses_cache)

    def run(x: Tensor) -> Tensor:
        pieces = x.tensor_split(max(1, min(chunks, x.shape[1])), dim=1)
        return torch.cat([run_checkpointed(piece, x) for x in pieces], dim=1)

    return run


# ------------------------------------------------------------------------------------------------- first use


def find_token_wise_mlps(model: PreTrainedModel) -> list[str]:
    """Return the names, in the model's backbone, of the modules that may run in pieces.

    These are children of the layers, themselves made of modules, that turn one tensor (batch, tokens,
    hidden) into one of the same shape in which no token depends on another. That is found by running the
    backbone on a few tokens, as names say nothing."""
    backbone, names = backbone_of(model), list[str]()

    def note(name: str, module: nn.Module, args: tuple[object, ...], kwargs: object, output: object) -> None:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        if x.dim() == 3 and x.shape == output.shape:
            if (kind := weights_type(module)).is_gathered:
                check.refuse(backbone, f"MiniSequence: call {kind.name} for {name}, not for parts of it")
            if _is_token_wise(module, x):
                names.append(name)

    with contextlib.ExitStack() as stack:
        for layer, module in layers_of(backbone).items():
            for name, child in module.named_children():
                if any(child.children()) and any(p.dim() > 1 for p in child.parameters()):
                    hook = functools.partial(note, f"{layer}.{name}")
                    # Before hooks that free gathered parameters.
                    stack.callback(child.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)
        with torch.inference_mode(False), torch.no_grad(), in_eval_mode(backbone):
            backbone(input_ids=example_tokens(backbone)[0], use_cache=False)
    return names


def _is_token_wise(module: nn.Module, x: Tensor) -> bool:
    """Whether pieces give the output of the whole, and each output has no gradient at all to another
    token."""
    expected, pieces = module.forward(x), in_pieces(module.forward, 3)(x)
    if not alike(pieces, expected):
        return False
    middle = x.shape[1] // 2
    # Weights made in inference mode can be evaluated, but not differentiated.
    copies: dict[Tensor, Tensor] = {p: p.clone() for p in module.parameters() if p.is_inference()}
    with torch.enable_grad(), ModuleTensors(module).replaced(copies):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(module.forward(x)[:, middle].square().sum(), x)
    dx[:, middle] = 0
    return not bool(dx.any())


def trial_loss(
    pieces: Pieces, kind: CallKind, mlps: Sequence[str]
) -> Callable[[PreTrainedModel, Tensor, Tensor], Tensor]:
    """Return the function that computes the loss of a causal LM by mini-sequences, for a trial.

    Args:
        kind: of the call. mlps: as in `total_loss`; a copy of the model may lack some of their layers.
    """

    def compute_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
        call = Call(model, example_inputs(model, ids, labels, kind))
        names = {name for name, _ in backbone_of(model).named_modules()}
        return total_loss(call, pieces, [name for name in mlps if name in names]) / call.divisor

    return compute_loss
