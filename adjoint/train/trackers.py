"""Experiment trackers: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from adjoint.errors import UserError, why_not_imported
from adjoint.train.metrics import MetricsRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def are_trackers(text: str) -> bool:
    """Whether a text is a valid value of ``training.report_to``."""
    return text == "none" or all(name in _MODULES for name in text.split(","))


class Trackers:
    """The trackers that a run reports to, `names` (``training.report_to``).

    TensorBoard drops what was reported after `step`. Raises UserError if a package is not installed.
    """

    def __init__(self, names: str, path: Path, step: int, config: Mapping[str, Mapping[str, object]]) -> None:
        modules = {name: _imported(name) for name in names.split(",") if name != "none"}
        self._log: list[Callable[..., object]] = []  # each called with (values, step=)
        self._close: list[Callable[[], object]] = []
        for name, module in modules.items():
            if name == "tensorboard":
                board = module.SummaryWriter(str(path / "tensorboard"), purge_step=step + 1)
                self._log.append(functools.partial(_write_scalars, board))
                self._close.append(board.close)
            else:
                place = {"dir": str(path)} if name == "wandb" else {}
                module.init(project="adjoint", name=path.name, config=config, **place)
                self._log.append(module.log)
                self._close.append(module.finish)

    def show(self, row: MetricsRow) -> None:
        """Report a step's metrics."""
        values = {key: value for key, value in row.items() if isinstance(value, int | float)}
        values |= {f"windows/layer {k}": window for k, window in enumerate(row.get("windows", []))}
        for log in self._log:
            log(values, step=row["step"])

    def close(self) -> None:
        for close in self._close:
            close()


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(f"training.report_to: {why_not_imported(error, name)}") from None


def _write_scalars(board: SummaryWriter, values: dict[str, float], step: int) -> None:
    for key, value in values.items():
        board.add_scalar(key, value, step)
