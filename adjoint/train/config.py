"""Configuration of a training run: the dataclasses behind YAML files and ``--section.key value`` flags.

`adjoint.train.flags` builds one parser from them, so a key exists here, in YAML and as a flag, or nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adjoint.data.batches import DataConfig
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.methods import METHODS


@dataclass(frozen=True)
class MethodConfig:
    """How the gradient is computed: the name of a method and the arguments it takes.

    Args:
        name: the method, a key of ``adjoint.methods.METHODS``.
        arguments: the method's own arguments; what is absent takes the method's default.
    """

    name: str = "exact"
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise UserError(f"method.name: {self.name!r} is not a method; choose one of {', '.join(METHODS)}")
        taken = {f.name for f in dataclasses.fields(METHODS[self.name])}
        for key in self.arguments:
            if key not in taken:
                takers = [
                    name for name, cls in METHODS.items() if key in {f.name for f in dataclasses.fields(cls)}
                ]
                raise UserError(
                    f"method.{key}: the method {self.name!r} takes no {key} "
                    f"(taken by: {', '.join(takers) or 'none'}); "
                    f"set --method.{key} null or choose another --method.name"
                )
        for needed in dataclasses.fields(METHODS[self.name]):
            if needed.default is dataclasses.MISSING and needed.name not in self.arguments:
                raise UserError(
                    f"method.{needed.name}: the method {self.name!r} needs it; "
                    f"give --method.{needed.name} VALUE"
                )
        self.build()

    def build(self) -> Any:
        """The method object itself. Raises UserError where the method refuses one of its arguments."""
        try:
            return METHODS[self.name](**self.arguments)
        except ValueError as error:
            raise UserError(f"method ({self.name}): {error}") from error


@dataclass(frozen=True)
class TrainingConfig:
    """Optimisation, evaluation and what a run writes.

    Args:
        steps: optimizer steps of the whole run.
        seed: seed of the initial weights, of the order of the data and of the samples.
        lr: highest learning rate, reached after the warm-up.
        min_lr: learning rate at the last step, where the cosine ends; null is a tenth of lr.
        warmup_steps: steps of the linear warm-up, capped at half of the run.
        weight_decay: AdamW's decay, applied to the projection matrices only.
        betas: AdamW's two moments' decay rates.
        eps: AdamW's epsilon.
        grad_clip: largest L2 norm of the gradient; 0 switches clipping off.
        grad_accumulation: batches whose gradients are added up for one optimizer step.
        precision: "auto" is bfloat16 autocast on CUDA devices that have it natively, float32 elsewhere.
        device: "auto" is CUDA where there is one, else the CPU; or cpu, cuda, cuda:1, …
        deterministic: only deterministic algorithms; null is true on the CPU and false elsewhere.
        threads: CPU threads; null leaves PyTorch's own choice.
        eval_every: steps between evaluations on the held-out text; 0 is at the end only.
        save_every: steps between checkpoints; 0 is at the end only.
        keep_checkpoints: how many of the newest checkpoints are kept.
        log_every: steps between log lines where there is no terminal for a progress bar.
        sample_tokens: tokens generated at the end; 0 switches the sample off.
        sample_prompt: text that the sample continues.
        sample_temperature: temperature of the sample; lower is more conservative.
        tensorboard: also write TensorBoard event files to the run's folder.
    """

    steps: int = 200
    seed: int = 0
    lr: float = 6e-3
    min_lr: float | None = None
    warmup_steps: int = 10
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    grad_clip: float = 1.0
    grad_accumulation: int = 1
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    device: str = "auto"
    deterministic: bool | None = None
    threads: int | None = None
    eval_every: int = 50
    save_every: int = 50
    keep_checkpoints: int = 2
    log_every: int = 1
    sample_tokens: int = 400
    sample_prompt: str = "def "
    sample_temperature: float = 0.8
    tensorboard: bool = False

    def __post_init__(self) -> None:
        at_least = dict.fromkeys(
            ("steps", "grad_accumulation", "keep_checkpoints", "log_every", "threads"), 1
        )
        at_least |= dict.fromkeys(("seed", "warmup_steps", "eval_every", "save_every", "sample_tokens"), 0)
        positive = ("lr", "eps", "sample_temperature")
        for key, lowest in at_least.items():
            value = getattr(self, key)
            if value is not None and value < lowest:
                raise UserError(f"training.{key}: must be at least {lowest}, got {value}")
        for key in (*positive, "min_lr", "weight_decay", "grad_clip"):
            value = getattr(self, key)
            if value is not None and not (
                math.isfinite(value) and (value > 0 or (value == 0 and key not in positive))
            ):
                word = "positive" if key in positive else "zero or positive"
                raise UserError(f"training.{key}: must be a {word} finite number, got {value}")
        if self.seed >= 2**63:
            raise UserError(f"training.seed: must be below 2**63, got {self.seed}")
        if self.min_lr is not None and self.min_lr > self.lr:
            raise UserError(f"training.min_lr: {self.min_lr} is above training.lr {self.lr}; lower it")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"training.betas: two numbers in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class RunConfig:
    """Where a run is written and whether it continues an earlier one.

    Args:
        dir: folder of the run; null takes runs/NAME, or runs/NAME-2, … if that is taken.
        name: NAME above; null is the name of the configuration file.
        resume: "never" starts anew, "auto" continues from the newest good checkpoint of the run (and starts
            anew where there is none), or the path of a checkpoint. ``--resume`` is short for it.
    """

    dir: str | None = None
    name: str | None = None
    resume: str = "never"

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name or Path(self.name).name != self.name):
            raise UserError(f"run.name: {self.name!r} is not a folder's name; a path goes to --run.dir")
        if not self.resume:
            raise UserError("run.resume: is empty; use auto, never or the path of a checkpoint")


@dataclass(frozen=True)
class ClusterConfig:
    """Training over several processes, each of which owns some of the layers.

    Args:
        shards: processes that share the layers; 0 trains in this process, without Ray; "auto" takes what the
            cluster of RAY_ADDRESS (inside a job), or else this machine, has room for.
        replicas: pipelines of that many shards each, which share the rows of every batch out; a replica needs
            a row. Gradients are summed over them; losses and weights are those of one replica, to rounding.
        sequence: processes that share every sequence of a replica, each with the whole model and a stretch of
            the tokens; for the method exact and one shard. Losses and weights are those of one process, to
            rounding.
        exchange: how those processes carry states over from stretch to stretch: "affine" runs over the tokens
            once more, all at once; "wavefront" waits for the neighbour, layer by layer; "auto" is the faster.
        helpers: further processes that share the shards' tasks, for the method layer-local; of each replica.
        cpus: CPUs a process asks for.
        transport: how tensors travel between shards; "auto" is nccl between whole GPUs, gloo elsewhere;
            object-store is Ray's, slower for small chunks, without a process group.
        max_failures: how many times lost shards are made anew from the last checkpoint before the run stops;
            machines that are taken away on purpose do not count.
        start_timeout: seconds within which the shards must have got their place.
        hang_timeout: seconds without a sign of life after which a shard counts as lost.
    """

    shards: int | Literal["auto"] = 0
    replicas: int = 1
    sequence: int = 1
    exchange: Literal["auto", "affine", "wavefront"] = "auto"
    helpers: int = 0
    cpus: int = 1
    transport: Literal["auto", "gloo", "nccl", "object-store"] = "auto"
    max_failures: int = 3
    start_timeout: float = 300.0
    hang_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.shards != "auto" and self.shards < 0:
            raise UserError(
                f'cluster.shards: must be 0 (no Ray), a number of processes or "auto", got {self.shards}'
            )
        least = {"replicas": 1, "sequence": 1, "helpers": 0, "cpus": 1, "max_failures": 0}
        for key, lowest in least.items():
            if getattr(self, key) < lowest:
                raise UserError(f"cluster.{key}: must be at least {lowest}, got {getattr(self, key)}")
        if self.shards == 0 and self.replicas > 1:
            raise UserError(
                f"cluster.replicas: {self.replicas} replicas run in processes of their own; give "
                "--cluster.shards 1 or more, or --cluster.replicas 1"
            )
        if self.shards == 0 and self.sequence > 1:
            raise UserError(
                f"cluster.sequence: {self.sequence} workers run in processes of their own; give "
                "--cluster.shards 1, or --cluster.sequence 1"
            )
        for key in ("start_timeout", "hang_timeout"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"cluster.{key}: must be a positive number of seconds, got {value}")


def default_model() -> StackConfig:
    """The model of ``configs/default.yaml``: small enough to learn something on two cores in minutes."""
    return StackConfig(vocab_size=256, d_model=128, n_layer=2, mixer="mamba")


@dataclass(frozen=True)
class Config:
    """Everything a run needs. ``Config()`` is the main job, the same as ``configs/default.yaml``."""

    model: StackConfig = field(default_factory=default_model)
    method: MethodConfig = field(default_factory=MethodConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values (numbers, strings, lists, None), complete: every key of this run."""
        nested = {f.name: plain(dataclasses.asdict(getattr(self, f.name))) for f in dataclasses.fields(self)}
        nested["method"] = {"name": self.method.name, **plain(dataclasses.asdict(self.method.build()))}
        return nested

    def to_yaml(self) -> str:
        """The configuration as YAML that ``--config`` reads back to an equal configuration."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_config(argv: list[str], prog: str = "adjoint train") -> Config:
    """Read ``--config FILE`` (any number, later ones win) and ``--section.key value`` flags (they win).

    Raises:
        UserError: one line naming the flag or file, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help`` or ``--print_config``.
    """
    from adjoint.train.flags import parse  # jsonargparse is needed by the command line only

    return parse(argv, prog)


def plain(value: Any) -> Any:
    """Tuples as lists, paths as text: what YAML and JSON can hold."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
