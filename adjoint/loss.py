"""Cross-entropy of the head in slices (Mini-Sequence Transformer, section 3): logits exist for one slice
of the tokens at a time."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from adjoint.batch import IGNORE_INDEX
from adjoint.kernels import dispatch
from adjoint.kernels.add_product import add_product
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
from adjoint.kernels.collectives import all_gather_single

# Elements of a slice's logits: 16 MiB in float32 on a CPU; 256 MiB on a GPU, which needs more to keep busy.
SLICE_ELEMENTS, SLICE_ELEMENTS_CUDA = 1 << 22, 1 << 26
# Devices on which launches cost more than what `_softmax_loss` holds besides the logits.
FUSED_DEVICES = ("cuda",)
# Attribute of a head's weight: a function that returns the `WeightSum` of this use of it, or None.
WEIGHT_SUM = "_adjoint_weight_sum"


class WeightSum(NamedTuple):
    """A sum over chunks to which the weight's gradient is added while the loss is computed.

    Attributes:
        total: (vocab_size, d_model), in `accumulate_dtype`.
        cotangent: what the backward of the loss will get, a scalar.
        is_added: whether an earlier run of the same chunk has added the gradient already.
    """

    total: Tensor
    cotangent: Tensor
    is_added: bool


class VocabularyShard(NamedTuple):
    """A rank's part of a vocabulary that is split over a group.

    Attributes:
        group: the ranks that have the parts.
        first: the first token id of this part.
        vocab_size: number of token ids in all parts.
    """

    group: dist.ProcessGroup
    first: int
    vocab_size: int

    def rows_of(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the row of each token id in this part of `size` rows, else 0; and whether it has one."""
        rows = ids - self.first
        is_here = (rows >= 0) & (rows < size)
        return torch.where(is_here, rows, 0), is_here


class _HeadCall(NamedTuple):
    """Options of one cross-entropy of a head.

    Attributes:
        slice_tokens, shard: as in `linear_cross_entropy`.
        backward_follows: whether the hidden states or the weight are trained.
        weight_is_trained: whether the weight is.
        weight_sum: to which its gradient is added now; None for a gradient in the backward.
    """

    slice_tokens: int
    shard: VocabularyShard | None
    backward_follows: bool
    weight_is_trained: bool
    weight_sum: WeightSum | None


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear map, whose forward computes the gradients already.

    While a slice's logits exist they are one subtraction away: the backward need not make the logits
    again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, call: _HeadCall) -> Tensor:
        slice_tokens, shard, backward_follows, weight_is_trained, weight_sum = call
        # (tokens,), or with how often each counts (2, tokens)
        targets, weights = targets if targets.dim() == 2 else (targets, None)
        tokens = hidden.shape[0]
        dtype = accumulate_dtype(hidden.dtype)
        loss = hidden.new_zeros((), dtype=dtype)
        d_hidden = torch.empty_like(hidden) if backward_follows else None
        makes_gradient = backward_follows and weight_is_trained and weight_sum is None
        # Of a single slice the factors of the weight's gradient are kept, where they are smaller. Not in
        # float16, which may not hold hidden states times a small d_loss.
        keeps_factors = (
            makes_gradient
            and hidden.dtype == torch.bfloat16
            and 0 < tokens <= slice_tokens
            and hidden.element_size() * tokens < dtype.itemsize * hidden.shape[1]
        )
        total, cotangent = (None, None) if weight_sum is None or weight_sum.is_added else weight_sum[:2]
        if makes_gradient and not keeps_factors:
            total = torch.zeros_like(weight, dtype=dtype)
        saved: tuple[Tensor | None, ...] = d_hidden, None if weight_sum is not None else total, None
        is_fused = hidden.device.type in FUSED_DEVICES and shard is None and weights is None
        marks = _target_marks(targets, dtype) if is_fused and backward_follows else None
        for start in range(0, tokens, slice_tokens):
            h, y = hidden[start : start + slice_tokens], targets[start : start + slice_tokens]
            if is_fused:
                marks_of_slice = marks and TargetMarks(*(t[start : start + slice_tokens] for t in marks))
                slice_loss, d_logits = _softmax_loss(h @ weight.T, y, dtype, marks_of_slice)
            else:
                slice_weights = None if weights is None else weights[start : start + slice_tokens].to(dtype)
                logits = (h @ weight.T).to(dtype)
                slice_loss, d_logits = _loss_in_place(logits, y, slice_weights, shard, backward_follows)
                del logits
            # not +=: torch 2.11's compiler would then give no gradients
            loss = loss + slice_loss
            if d_hidden is not None and d_logits is not None:
                d_logits = d_logits.to(h.dtype)
                torch.mm(d_logits, weight, out=d_hidden[start : start + slice_tokens])
                if keeps_factors:
                    saved = d_hidden, d_logits, hidden
                elif total is not None:
                    _add_to_sum(total, d_logits.T, h if cotangent is None else h * cotangent)
            del d_logits  # before the next slice's are made
        ctx.save_for_backward(*saved)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        d_hidden, factor_or_gradient, hidden = ctx.saved_tensors
        d_hidden = _scaled(d_hidden, d_loss, d_hidden.dtype)
        if factor_or_gradient is None:
            d_weight = None
        elif hidden is None:
            d_weight = _scaled(factor_or_gradient, d_loss, ctx.dtype)
        else:  # the product is rounded once, when it has been summed
            d_weight = factor_or_gradient.T @ _scaled(hidden, d_loss, hidden.dtype)
        return d_hidden, d_weight, None, None


def _add_to_sum(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which has their dtype, or float32 for factors in half precision."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        add_product(total, a, b)


class TargetMarks(NamedTuple):
    """Columns (tokens, 1) made of targets, which the gradient of logits reads.

    Attributes:
        labels: the targets, 0 where they are ignored. ignored: where they are.
        minus_one: -1, to be added to the probabilities of labels.
    """

    labels: Tensor
    ignored: Tensor
    minus_one: Tensor


def _target_marks(targets: Tensor, dtype: torch.dtype) -> TargetMarks:
    column = targets.unsqueeze(1)
    minus_one = column.new_full((), -1, dtype=dtype).expand_as(column)
    return TargetMarks(column.clamp(0), column == IGNORE_INDEX, minus_one)


def _softmax_loss(
    logits: Tensor, targets: Tensor, dtype: torch.dtype, marks: TargetMarks | None
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of logits, and its gradient in their dtype, or None without marks.

    It computes in `dtype`, by half of `_loss_in_place`'s launches.

    Args:
        logits: (tokens, vocab_size). targets: (tokens,); `IGNORE_INDEX` counts for nothing.
    """
    narrow, wide = logits.dtype, logits.to(dtype)
    del logits  # before as much is made once more
    log_probabilities = torch.log_softmax(wide, 1)
    del wide
    loss = F.nll_loss(log_probabilities, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    if marks is None:
        return loss, None
    d_logits = log_probabilities.exp_()
    d_logits.scatter_add_(1, marks.labels, marks.minus_one)
    return loss, d_logits.masked_fill_(marks.ignored, 0).to(narrow)


def _loss_in_place(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    shard: VocabularyShard | None,
    backward_follows: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of logits, and its gradient in the logits' own memory, or None.

    Args:
        logits: (tokens, vocab_size), of the shard's part of the vocabulary. targets: as in `_softmax_loss`.
        weights: (tokens,), how often each target counts; None for once.
    """
    valid = targets != IGNORE_INDEX
    labels = torch.where(valid, targets, 0).unsqueeze(1)
    has_label = valid.unsqueeze(1)
    if shard is not None:
        labels, is_here = shard.rows_of(labels, logits.shape[1])
        has_label = has_label & is_here
    log_normalizer, label_logits = logits.logsumexp(1, keepdim=True), logits.gather(1, labels)
    if shard is not None:
        log_normalizer, label_logits = _over_ranks(log_normalizer, label_logits, has_label, shard.group)
    token_losses = (log_normalizer - label_logits).squeeze(1)
    token_losses = token_losses.where(valid, 0)  # not times valid: others' may be infinite
    loss = (token_losses if weights is None else token_losses * weights).sum()
    if not backward_follows:
        return loss, None
    d_logits = logits.sub_(log_normalizer).exp_()  # softmax
    d_logits.scatter_add_(1, labels, -has_label.to(logits.dtype))
    d_logits.masked_fill_(~valid.unsqueeze(1), 0)
    return loss, d_logits if weights is None else d_logits.mul_(weights.unsqueeze(1))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in `dtype`, rounded as it is written: of a head's weight a second copy in float32
    would take more memory than the rest of a short chunk."""
    if torch.promote_types(gradient.dtype, factor.dtype) == dtype:
        return gradient * factor
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _over_ranks(
    log_normalizer: Tensor, label_logits: Tensor, has_label: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the sum of all ranks' exponentials, and the labels' logits, (tokens, 1) each.

    Args:
        log_normalizer: of this rank's part of the vocabulary.
        label_logits: of the labels that are in it. has_label: whether a token's label is.
    """
    local = torch.cat([log_normalizer, torch.where(has_label, label_logits, 0)], dim=1)
    gathered = local.new_empty(dist.get_world_size(group) * len(local), 2)
    all_gather_single(gathered, local, group=group)
    normalizers, logits = gathered.view(-1, len(local), 2).unbind(-1)
    return normalizers.logsumexp(0).unsqueeze(1), logits.sum(0).unsqueeze(1)


def tokens_per_slice(tokens: int, vocab_size: int, on_gpu: bool, slices: int | None = None) -> int:
    """Return the number of tokens in a slice, whose logits exist at the same time.

    Args:
        tokens: number of tokens in the batch.
        slices: number of slices; None keeps a slice's logits below 16 MiB, or 256 MiB on a GPU.
    """
    if slices is not None:
        return max(1, -(-tokens // slices))
    return max(1, (SLICE_ELEMENTS_CUDA if on_gpu else SLICE_ELEMENTS) // vocab_size)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    slice_tokens: int | None = None,
    shard: VocabularyShard | None = None,
    weights: Tensor | None = None,
    is_loss: bool = False,
) -> Tensor:
    """Return the sum over valid targets of -log softmax(hidden weightᵀ)[target].

    It is in float32, for float64 inputs in float64.

    For the mean, divide by the number of valid targets of the *whole* batch: a mean of slices' means is
    another number.

    Args:
        hidden: (…, d_model). weight: (vocab_size, d_model). targets: (…,) int64; -100 is ignored.
        slice_tokens: tokens per slice; None calls `tokens_per_slice`. It need not divide anything.
        shard: the part of the vocabulary that weight has rows of, where a group of ranks splits it: all call
            with the same hidden and targets. The gradient of hidden is then this rank's term of the whole.
        weights: (…,), how often each target counts; None for once.
        is_loss: whether the result itself, or a sum with other terms, is the loss of a chunk: then the
            weight's gradient is added to the `WeightSum` of the weight, if it has one.

    Raises:
        ValueError: slice_tokens is not positive, or targets do not match hidden.
    """
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} must have hidden's shape without its last dimension, "
            f"{tuple(hidden.shape)}"
        )
    if slice_tokens is None:
        ids = len(weight)
        if shard is not None:  # parts may differ by an id, but ranks must have the same slices
            ids = -(-shard.vocab_size // dist.get_world_size(shard.group))
        slice_tokens = tokens_per_slice(targets.numel(), ids, hidden.is_cuda)
    if slice_tokens < 1:
        raise ValueError(f"slice_tokens must be 1 or more, got {slice_tokens}")
    dtype = dispatch.autocast_dtype(hidden.device)
    weight_sum = _weight_sum_of(weight, hidden.dtype if dtype is None else dtype) if is_loss else None
    if dtype is not None:  # as autocast would do for a linear layer
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    backward_follows = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            targets.reshape(-1) if weights is None else torch.stack([targets, weights]).flatten(1),
            _HeadCall(slice_tokens, shard, backward_follows, weight.requires_grad, weight_sum),
        )


def _weight_sum_of(weight: Tensor, dtype: torch.dtype) -> WeightSum | None:
    """Return the sum to which products of factors of this dtype can be added, None if there is none.

    None in float16, which may not hold hidden states times a small cotangent."""
    find_sum = getattr(weight, WEIGHT_SUM, None) if torch.is_grad_enabled() else None
    if find_sum is None or not weight.requires_grad or dtype == torch.float16:
        return None
    weight_sum: WeightSum | None = find_sum()
    if weight_sum is None:
        return None
    total = weight_sum.total
    fits = total.shape == weight.shape and total.dtype == accumulate_dtype(dtype)
    return weight_sum if fits and total.device == weight.device else None


class _LogProbsContext(Protocol):
    """The values that `_LinearLogProbs` keeps from its forward for its backward."""

    temperature: float
    slice_tokens: int
    saved_tensors: tuple[Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities of labels under a linear map's softmax; the backward makes each slice's logits again.

    Their cotangents are not known before: a policy's loss weighs each token."""

    @staticmethod
    def forward(
        ctx: _LogProbsContext,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        slice_tokens: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.temperature, ctx.slice_tokens = temperature, slice_tokens
        results = hidden.new_empty(len(hidden), dtype=accumulate_dtype(hidden.dtype))
        for start in range(0, len(hidden), slice_tokens):
            tokens = slice(start, start + slice_tokens)
            logits = (hidden[tokens] @ weight.T).to(results.dtype).div_(temperature)
            results[tokens] = selected_logprobs(logits, labels[tokens])
        return results

    @staticmethod
    @differentiable_once("token_logprobs")
    def backward(ctx: _LogProbsContext, cotangents: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        dtype = cotangents.dtype
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.slice_tokens):
            tokens = slice(start, start + ctx.slice_tokens)
            h, d = hidden[tokens], cotangents[tokens, None] / ctx.temperature
            logits = (h @ weight.T).to(dtype).div_(ctx.temperature)
            d_logits = logits.sub_(logits.logsumexp(1, keepdim=True)).exp_().mul_(-d)
            d_logits = d_logits.scatter_add_(1, labels[tokens, None], d).to(h.dtype)
            if d_hidden is not None:
                d_hidden[tokens] = d_logits @ weight
            if d_weight is not None and h.dtype == dtype:
                d_weight += d_logits.T @ h
            elif d_weight is not None:
                add_product(d_weight, d_logits.T, h)
            del logits, d_logits  # before the next slice's are made
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def selected_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels, (tokens,), under the softmax of logits (tokens, vocab_size)."""
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, slice_tokens: int | None = None
) -> Tensor:
    """Return log softmax(hidden weightᵀ / temperature)[label] of each token, (tokens,).

    It is in float32, for float64 inputs in float64; logits exist for one slice of the tokens at a time.

    Args:
        hidden: (tokens, d_model). weight: (vocab_size, d_model). labels: (tokens,) int64.
        slice_tokens: tokens per slice; None calls `tokens_per_slice`.
    """
    if slice_tokens is None:
        slice_tokens = tokens_per_slice(len(hidden), len(weight), hidden.is_cuda)
    dtype = dispatch.autocast_dtype(hidden.device)
    if dtype is not None:  # as autocast would do for a linear layer
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearLogProbs.apply(hidden, weight, labels, temperature, slice_tokens)
