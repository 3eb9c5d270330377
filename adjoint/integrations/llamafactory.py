"""LLaMA-Factory: it takes callbacks from Python alone, so this module takes the place of its command.

    python -m adjoint.integrations.llamafactory train.yaml      # llamafactory-cli train train.yaml
    torchrun --nproc-per-node 2 -m adjoint.integrations.llamafactory train.yaml

The method comes from the environment (`ADJOINT_METHOD__CHUNK_SIZE=4096`).
"""

from __future__ import annotations


def main() -> None:
    """Run LLaMA-Factory's training with the arguments of the command line and an `AdjointCallback`."""
    from llamafactory.train.tuner import run_exp

    from adjoint.integrations.transformers_trainer import AdjointCallback

    run_exp(callbacks=[AdjointCallback()])


if __name__ == "__main__":
    main()
