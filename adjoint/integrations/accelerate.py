"""accelerate: the processes along `cp_size` share each sequence of a wrapped model.

    from adjoint.integrations.accelerate import SequenceGroupConfig

    config = SequenceGroupConfig(cp_size=2, dp_replicate_size=2)
    Accelerator(parallelism_config=config)  # or TrainingArguments(parallelism_config=config)

accelerate's own `ParallelismConfig(cp_size=2)` does, too, where accelerate takes it: on GPUs, with FSDP2.
"""

from __future__ import annotations

from adjoint.hf.parallelism_config import SequenceGroupConfig

__all__ = ["SequenceGroupConfig"]
