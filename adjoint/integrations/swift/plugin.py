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
    raise UserError(
        "sequence_parallel_size is ms-swift's own, which splits the inputs of attention: leave it out, and "
        "set ACCELERATE_USE_PARALLELISM_CONFIG: 'true' and PARALLELISM_CONFIG_CP_SIZE: in ENV"
    )


# At each step ms-swift reads `outputs.logits`, if there are any, for an accuracy: a second forward would make
# them.
os.environ.setdefault(LOGITS, "none")
Seq2SeqTrainer.get_use_logits_to_keep = _keeps_no_logits
SequenceParallel.prepare = _refuse_sequence_parallel
add_to_every_trainer()
