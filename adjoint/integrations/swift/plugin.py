"""The file for ms-swift's `--external_plugins`: every Trainer of the process gets an `AdjointCallback`."""

from adjoint.integrations.trainer import add_to_every_trainer

add_to_every_trainer()
