"""The file for ms-swift's `--external_plugins`: every Trainer of the process gets an `AdjointCallback`."""

import os

from swift.sequence_parallel import SequenceParallel
from swift.trainers import Seq2SeqTrainer

from adjoint.errors import UserError
from adjoint.hf.outputs import LOGITS
from adjoint.integrations.transformers_trainer import add_to_every_trainer


def _keeps_no_logits(self: object, default_value: bool = True) -> bool:
    """Answer in the place of ms-swift's `use_logits_to_keep`, which shortens labels to the answers.

    A wrapped model makes no logits, and reads labels of all tokens."""
    return False


def _refuse_sequence_parallel(self: object, *_: object, **__: object) -> None:
    """Answer in the place of ms-swift's preparation of a model whose inputs it splits."""
    raise UserError(f"sequence_parallel_size splits the inputs of attention: {USE_OTHERS}")


USE_OTHERS = (
    "ranks share a wrapped model's sequences in TRL's SFTTrainer, axolotl and LLaMA-Factory, by "
    "ParallelismConfig(cp_size=), not in ms-swift, which deals rows to all processes: leave it out"
)
if int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")) > 1:
    raise UserError(f"PARALLELISM_CONFIG_CP_SIZE: {USE_OTHERS}")
# At each step ms-swift reads `outputs.logits`, if there are any, for an accuracy: a second forward would make
# them.
os.environ.setdefault(LOGITS, "none")
Seq2SeqTrainer.get_use_logits_to_keep = _keeps_no_logits
SequenceParallel.prepare = _refuse_sequence_parallel
add_to_every_trainer()
