"""Write the table of flash-linear-attention's classes of docs/models_classes.md: try each causal LM of
`fla.models` with every set of options of tests/external/test_fla.py, against references in plain PyTorch.

After `make test-external`, which fetches fla:

PYTHONPATH=build/external-kernels python -m scripts.fla_classes
"""

from __future__ import annotations

import warnings

import fla.models
import torch

import adjoint
from adjoint.engine.verification import Refused
from adjoint.fla.functions import UNSUPPORTED
from benchmarks.report import put_table
from scripts import tested_classes
from tests.external import test_fla
from tests.hf.hf_models import float64_throughout
from tests.model_helpers import relative

LAYERS = {
    "Comba": "a delta rule that reads by other keys than it writes",
    "DeltaNet": "the delta rule without decay",
    "GLA": "gated linear attention: a decay per channel of the keys",
    "GSA": "gated slot attention",
    "GatedDeltaNet": "the gated delta rule",
    "GatedDeltaProduct": "the gated delta rule with several writes per token",
    "HGRN": "a diagonal recurrence",
    "HGRN2": "gated linear attention with tied keys and decays",
    "KDA": "Kimi Delta Attention",
    "LightNet": "gated linear attention whose keys are a softmax over earlier tokens",
    "LinearAttention": "linear attention without decay, normalized or not",
    "MLA": "latent attention",
    "Mamba": "Mamba",
    "Mamba2": "Mamba-2",
    "PrecondGatedDeltaNet": "the gated delta rule with preconditioned keys",
    "PrecondKDA": "Kimi Delta Attention with preconditioned keys",
    "RWKV6": "RWKV-6: a decay per channel of the keys, and a bonus",
    "RWKV7": "RWKV-7: the generalised delta rule, with its penalty of largest logits (`use_l2warp`)",
    "Raven": "slot attention that writes to a few slots",
    "RetNet": "retention: a constant decay per head",
    "Rodimus": 'gated linear attention; `block_type="rodimus"`',
    "Samba": "Mamba and attention in a window",
    "Transformer": "attention",
}


def largest_error(name: str) -> float:
    """Return the largest relative error of a parameter's gradient by chunks, of one set of options."""
    model = test_fla.make(name)
    ids = torch.randint(31, (2, 37), generator=torch.Generator().manual_seed(1))
    _, expected = test_fla.run_by_references(model, input_ids=ids, labels=ids)
    adjoint.wrap(model, adjoint.Exact(4))
    with float64_throughout():
        model(input_ids=ids, labels=ids).loss.backward()
    return max(float(relative(p.grad, expected[key])) for key, p in model.named_parameters())


def refusal(name: str) -> str:
    """Return why a class is refused, as its call says it.

    Raises:
        ValueError: it is not refused.
    """
    options, cls = test_fla.UNSUPPORTED[name]
    ids = torch.zeros(1, 9, dtype=torch.long)
    try:
        adjoint.wrap(test_fla.make(name, **options), adjoint.Exact(4))(input_ids=ids, labels=ids)
    except Refused as error:
        if UNSUPPORTED[cls] in str(error):
            return UNSUPPORTED[cls]
        raise
    raise ValueError(f"{name} is not refused")


def table() -> str:
    """Return a row per class: the largest error of all its sets of options, or the reason of its refusal."""
    lines = ["| class: gradient by chunks | model_type | layers |", "| --- | --- | --- |"]
    names = sorted(name for name in dir(fla.models) if name.endswith("ForCausalLM"))
    for refused in (False, True):
        for name in names:
            kind = name.removesuffix("ForCausalLM")
            if refused != (kind in test_fla.UNSUPPORTED):
                continue
            print(name, flush=True)
            if refused:
                outcome, layers = f"refused: {refusal(kind)}", ""
            else:
                variants = [variant for variant in test_fla.MODELS if variant.partition(",")[0] == kind]
                outcome, layers = f"{max(map(largest_error, variants)):.0e}", LAYERS[kind]
            model_type = getattr(fla.models, f"{kind}Config").model_type
            lines.append(f"| `{name}` {outcome} | `{model_type}` | {layers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.float = torch.float64  # to which HGRN casts its bounds
    put_table(tested_classes.PAGE, "fla table", table())
    tested_classes.write()


if __name__ == "__main__":
    main()
