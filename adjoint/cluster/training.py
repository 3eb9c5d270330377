"""Training over shards: the loop of `adjoint.train.trainer`, with the model in the hands of a `Group`.

`adjoint train` comes through here: with ``cluster.shards`` 0 it goes on to the loop in one process, or in
each of torchrun's, and Ray is never imported. A run over shards writes the same folder, and its checkpoints
are read by any number of shards and by one process.

When shards are lost the group is made again from the last checkpoint and the steps since are done again; the
order of batches and every draw are the checkpoint's, so that the run ends as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adjoint.checkpoint import (
    FileEntry,
    NoWholeCheckpoint,
    TrainerState,
    newest_checkpoint,
    read_rng,
    read_trainer,
    verify_trained_state,
)
from adjoint.cluster import placement, torchrun
from adjoint.cluster.group import Group
from adjoint.cluster.recovery import ShardFailure
from adjoint.cluster.shard import Microbatch, total_norm
from adjoint.cluster.shared_files import shared_files
from adjoint.engine.distribution import draw_adjoint_scale
from adjoint.engine.generators import set_torch_states, torch_states
from adjoint.engine.sharded_model import ShardedModel
from adjoint.errors import UserError
from adjoint.files.remote import Place, RemotePath, place_of
from adjoint.layers import StackConfig, State
from adjoint.methods import Method, as_picked
from adjoint.stack import Stack
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.checkpoint import check_config
from adjoint.train.config import Config, load_config
from adjoint.train.language_model import StackLM, model_class
from adjoint.train.machine import weights_dtype
from adjoint.train.metrics import MetricsRow
from adjoint.train.optimizer import learning_rate
from adjoint.train.rundir import open_run
from adjoint.train.trainer import LossAndWindows, Outcome, Start, Trainer
from adjoint.train.trainer import train as train_in_one_process

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


def main(argv: list[str]) -> int:
    """``adjoint train``: exit code 0, or 128 plus the signal that stopped the run (130 for Ctrl-C)."""
    try:
        config = load_config(argv)
    except UserError as error:
        torchrun.tell_others(str(error))
        raise
    outcome = train(config)
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def train(config: Config) -> Outcome:
    """Train as configured, over ``cluster.shards`` processes or in this one.

    Raises:
        UserError: something the user can mend; also more failures than ``cluster.max_failures``.
    """
    model_class(config.model.from_pretrained).check(config)
    if (process := torchrun.process_rank(config.cluster.shards)) is not None:
        return torchrun.train(config, process)
    layout, method, data = config.cluster.layout, config.method, config.data
    if config.cluster.shards == 0:
        return train_in_one_process(config)
    layout.check(config.model, method)
    layout.check_rows(data.batch)
    layout.check_chunks(method, data.seqlen)
    if config.training.profile:
        raise UserError("training.profile: records one process; set it or cluster.shards to 0")
    if config.training.save_async:
        raise UserError("training.save_async: shards save between steps; leave one of the two out")
    layout.check_run(method, config.training)
    layout.check_tensor(method, config.training.optimizer)
    each = placement.resources(config.training.device, config.cluster.cpus)
    folder, checkpoint = open_run(config.run)
    ours, trainer = False, None
    with folder:
        try:
            ours = placement.connect(layout.world, each)
            trainer = ShardedTrainer(config, folder, checkpoint)
            return trainer.run()
        finally:
            if trainer is not None:
                trainer.close()
            if ours:
                import ray

                ray.shutdown()


def described_model(config: Config, folder: Path | None) -> tuple[ShardedModel, Path | None]:
    """Return the model of a configuration, and the folder with its weights; None where shards draw them.

    Shards read a pretrained model's weights from its own folder where they can, else from `folder`, to which
    this function writes them; None writes none.
    """
    directory = config.model.from_pretrained
    if directory is None:
        with torch.device("meta"):
            StackLM.from_config(config)  # it is checked, and draws its seed, as in one process
        return ShardedStack(config.model), None
    from adjoint.hf.split import ShardedPretrained
    from adjoint.plan.outline import described_by_files
    from adjoint.train.pretrained import described

    weights: Path | None = Path(directory)
    trusted = config.model.trust_remote_code
    pretrained = described_by_files(directory, config.method, trusted)
    if pretrained is None:
        dtype = weights_dtype(config.training.precision)
        pretrained, weights = described(directory, config.method, folder, trusted, dtype), folder
    return ShardedPretrained(pretrained), weights


class ShardedTrainer(Trainer):
    """A run whose model lives in shards. This process draws the batches, calls the shards and writes."""

    group: Group | None = None
    failures = preemptions = 0
    announced = False

    def run(self) -> Outcome:
        """The steps that are left, through failures of shards."""
        while True:
            try:
                return super().run()
            except ShardFailure as failure:
                self._recover(failure)

    def close(self) -> None:
        """Ends the shards."""
        if self.group is not None:
            self.group.kill()
            self.group = None

    def _recover(self, failure: ShardFailure) -> None:
        """Makes the group again from the last checkpoint, or from the beginning where there is none yet.

        Raises:
            UserError: that was one failure too many, there is no place for the shards any more, or all
                checkpoints are damaged.
        """
        try:
            checkpoint = newest_checkpoint(self.folder.path / "checkpoints") or self.origin
        except NoWholeCheckpoint:
            if self.origin is None:
                raise
            verify_trained_state(self.origin)
            checkpoint = self.origin
        self._count_failure(failure, checkpoint)
        self._build(checkpoint)
        if checkpoint is None:
            self.step = self.saved_step = self.tokens = 0
            data, rng = self.beginning
            self.data.train.load_state_dict(data)
            self.begins_again = False
            set_torch_states(rng)
        else:
            self._resume(checkpoint)
        self.folder.start(self.step)

    def _count_failure(self, failure: ShardFailure, checkpoint: Place | None) -> None:
        """Gives up what is left of a group, and counts what befell it; that a machine was taken away on
        purpose is no failure of the run. What would come again is not tried again.

        Raises:
            UserError: that was one failure too many, or one that the user has to mend first.
            ShardFailure: an exception of the code.
        """
        self.close()
        cause, most, step = failure.causes[0], self.config.cluster.max_failures, self.step + 1
        if cause.kind == "error":
            raise failure from cause.error
        if cause.kind == "environment":
            raise UserError(
                f"{self.folder.path}: {failure}, at step {step}; it would happen again: all nodes need the "
                "folders of the run and of model.from_pretrained, free disk space and the same packages; "
                "correct that, then continue with --resume auto"
            ) from None
        if cause.kind == "preempted":
            self.preemptions += 1
            incident = f"preemption {self.preemptions}"
        else:
            self.failures += 1
            incident = f"failure {self.failures} of at most {most}"
        if self.failures > most:
            raise UserError(
                f"{self.folder.path}: {failure}, at step {step}; that is failure {self.failures} and "
                f"cluster.max_failures is {most}; remove the cause, then continue with --resume auto"
            ) from None
        done = 0 if checkpoint is None else read_trainer(checkpoint)["step"]
        print(
            f"{incident} at step {step}: {failure}; going on after step {done}", file=sys.stderr, flush=True
        )

    # ---------------------------------------------------------------- what is done to model and optimizer

    def _build(self, checkpoint: Place | None) -> None:
        config = self.config
        if not hasattr(self, "origin"):
            self.origin = checkpoint
            self.gauges: dict[str, Gauge] = {}
            folder = self.folder.local / "pretrained" if checkpoint is None else None
            self.whole, weights = described_model(config, folder)
            self.weights: Place | None = weights
            if isinstance(self.folder.path, RemotePath) and folder is not None and weights == folder:
                self.weights = self.folder.path / folder.name
                self.weights.upload_folder(folder, "model.safetensors")
            self.num_parameters = self.whole.num_parameters
            self.beginning = self.data.train.state_dict(), torch_states()
        if checkpoint is not None:
            check_config(checkpoint, config.to_dict())
        while True:
            try:
                self._make_group(checkpoint)
                return
            except ShardFailure as failure:
                self._count_failure(failure, checkpoint)
            except UserError as error:
                if self.failures + self.preemptions == 0:
                    raise
                raise UserError(f"{self.folder.path}: {error}; then continue with --resume auto") from None

    def _make_group(self, checkpoint: Place | None) -> None:
        config, settings = self.config, self.config.cluster
        threads = config.training.threads or settings.cpus
        folders = {"model.from_pretrained": config.model.from_pretrained, "run.resume": checkpoint}
        present = {
            setting: place_of(path).absolute() for setting, path in folders.items() if path is not None
        }
        with shared_files(self.folder.path, present, checkpoint or self.weights) as files:
            self.group = Group(
                self.whole,
                dataclasses.replace(config.training, threads=threads),
                self.method,
                settings,
                (config.data.batch, config.data.seqlen),
                files,
                await_nodes=self.failures + self.preemptions > 0,
            )
        self.precision = self.group.precision
        rows = settings.layout.rows(config.data.batch)
        self.chunk_size = min(self._all("chunk_size", rows, config.data.seqlen))

    def _all(self, name: str, *arguments: object, first: bool = False) -> list[Any]:
        assert self.group is not None
        return self.group.all(name, *arguments, first=first)

    def _picked_method(self) -> Method:
        spec = self.method.engine_spec(self.config.data.seqlen, self.chunk_size)
        return as_picked(self.method, spec)

    def _zero_grad(self) -> None:
        self._all("zero_grad")

    def _gradients(self, ids: torch.Tensor, start: Start, number: int, loss_divisor: float) -> LossAndWindows:
        batches, engine_spec = (
            self.settings.grad_accumulation,
            self.method.engine_spec(ids.shape[1], self.chunk_size),
        )
        chunks, carries = len(engine_spec.cuts(ids.shape[1])) - 1, self.settings.carries_states
        microbatch = Microbatch(
            loss_divisor,
            (number + 1) % batches == 0,
            number,
            draw_adjoint_scale(self.config.model.n_layer, chunks, engine_spec.backward.drop_probability),
            start if carries else (False, 0),
            self.data.ended(ids) if carries else None,
        )
        loss_shares = self._all("accumulate", ids.numpy(), self.chunk_size, self._seq_idx(ids), microbatch)
        auto = engine_spec.backward.window == "auto"
        picked = self._all("picked_windows", first=True)[0] if auto else None
        return sum(share for share in loss_shares if share is not None), picked

    def _seq_idx(self, ids: torch.Tensor) -> np.ndarray | None:
        seq_idx = self.data.seq_idx(ids)
        return None if seq_idx is None else seq_idx.numpy()

    def _update(self, step: int) -> float:
        norms = {name: norm for each in self._all("norms", first=True) for name, norm in each.items()}
        total = total_norm([norms[name] for name in self.whole.names if name in norms], self.precision)
        if not math.isfinite(total):
            self._diverged("gradient norm", total, step)
        self._all("step", learning_rate(step, self.settings), total)
        return total

    def _loss_of(self, ids: torch.Tensor) -> float:
        chunk_size = min(self.chunk_size, ids.shape[1])
        loss_shares = self._all("evaluate", ids.numpy(), chunk_size, self._seq_idx(ids))
        return sum(share for share in loss_shares if share is not None)

    def _files(self) -> Callable[[Path], dict[str, FileEntry]]:
        def write(folder: Path) -> dict[str, FileEntry]:
            target: Place = folder.absolute()
            if isinstance(self.folder.path, RemotePath):  # other machines do not see the folder
                target = self.folder.path / "checkpoints" / f"step-{self.step:08d}"
            written = self._all("save", str(target), first=True)
            return {name: entry for entries in written for name, entry in entries.items()}

        return write

    def _load(self, checkpoint: Place) -> tuple[TrainerState, dict[str, Any]]:
        return read_trainer(checkpoint), read_rng(checkpoint)  # the shards have read the rest

    def _sample(self) -> None:
        if self.config.model.from_pretrained is None:
            assert self.group is not None
            self.model = StackLM(StackInShards(self.config.model, self.group), self.method)
            super()._sample()
        elif self.settings.sample_tokens:
            print("no sample: sharded pretrained models cannot sample; run adjoint export, then generate")

    def _peak_memory_bytes(self) -> int:
        return max(self._all("peak_memory_bytes"))

    def _train_step(self) -> MetricsRow:
        """Train one step and publish its row as Ray gauges for the cluster's dashboard, if it has one.

        The gauges are ray_adjoint_loss and so on; lists such as ray_adjoint_windows have the layer as a tag.
        """
        from ray.util.metrics import Gauge

        row, run = super()._train_step(), {"run": self.folder.path.name}
        for key, value in ((key, value) for key, value in row.items() if value is not None):
            if key not in self.gauges:
                tags = ("run", "layer") if isinstance(value, list) else ("run",)
                self.gauges[key] = Gauge(f"adjoint_{key}", "of the last step", tags)
            if isinstance(value, list):
                for k, each in enumerate(value):
                    self.gauges[key].set(float(each), {**run, "layer": str(k)})
            elif isinstance(value, int | float):
                self.gauges[key].set(float(value), run)
        return row

    def _announce(self) -> None:
        assert self.group is not None
        if self.announced:
            return
        self.announced = True
        super()._announce()
        group, layout = self.group, self.group.layout
        layers = ", ".join(f"{span.start}-{span.stop - 1}" for span in group.spans)
        helpers = f", helpers: {layout.helpers}" if layout.helpers else ""
        split = f", each sequence over {layout.sequence} workers in turn" if layout.sequence > 1 else ""
        split += f", each weight over {layout.tensor} workers" if layout.tensor > 1 else ""
        replicas = f", replicas of all this: {layout.replicas}" if layout.replicas > 1 else ""
        placement_text = f"layers {layers}, on {group.device}{helpers}{split}{replicas}"
        print(f"shards: {layout.shards}, {placement_text}", flush=True)


class StackInShards(Stack):
    """A stack whose layers live in a group's shards, to continue sequences; one worker of each takes part."""

    def __init__(self, config: StackConfig, group: Group) -> None:
        with torch.device("meta"):
            super().__init__(config, seed=0)
        self.ranks, self.each = group.layout.of_each_shard, group.each

    def initial_state(self, batch: int) -> list[State]:
        return []

    def run_layers(
        self, x: torch.Tensor, states: list[State], *_: object
    ) -> tuple[torch.Tensor, list[State]]:
        y = x
        for ranks in self.ranks:
            y = self.each("hidden", dict.fromkeys(ranks, (y.cpu().numpy(), not states)))[0]
        return y.to(x.device), [()]  # which is not that of a beginning

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        logits = self.each("logits", dict.fromkeys(self.ranks[-1], (y.cpu().numpy(),)))[0]
        return logits.to(y.device)
