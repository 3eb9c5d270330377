"""Configuration of a training run: the dataclasses behind YAML files and ``--section.key value`` flags.

Every key is a field of a dataclass (a section of `Config`, or a method): its annotation says which values it
takes, in YAML as on the command line, and its `option` has its help text. Nothing here imports torch but what
makes a model's section: `check_values` refuses all else in a tenth of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from adjoint.data.config import DataConfig
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.layers.config import READERS
from adjoint.methods import METHODS, Method
from adjoint.settings import (
    Must,
    NotNegative,
    NotNegativeNumber,
    PathText,
    Positive,
    PositiveNumber,
    Text,
    check_fields,
    documented,
    helps_of,
    hints_of,
    in_words,
    is_path,
    option,
    read_value,
)
from adjoint.train.flags import Flags, unknown_key
from adjoint.train.layout import Layout
from adjoint.train.places import file_values
from adjoint.train.quantization import Quantization
from adjoint.train.trackers import are_trackers

Values = dict[str, Any]  # of keys
Precision = Literal["auto", "float32", "bfloat16", "float64"]
# Defaults that differ when fine-tuning a pretrained model.
FINE_TUNING = {"lr": 2e-5, "weight_decay": 0.0}


FolderName = Annotated[
    str,
    Must(
        "a folder's name (a path goes to --run.dir)",
        lambda name: is_path(name) and name != ".." and Path(name).name == name,
    ),
]
# The libraries that start threads end the process if it asks for far more.
Threads = Annotated[int, Must("a whole number from 1 to 4096", lambda n: 0 < n <= 4096)]
Betas = Annotated[tuple[float, float], Must("two numbers in [0, 1)", lambda b: all(0 <= x < 1 for x in b))]


@documented
@dataclass(frozen=True)
class TrainingConfig:
    """Optimisation, evaluation and output of a run."""

    steps: Positive = option(200, "optimizer steps of the whole run.")
    seed: NotNegative = option(0, "seed of the initial weights, the data order and the samples.")
    mask_share: Annotated[float, Must("a number between 0 and 1", lambda x: 0 < x < 1)] = option(
        0.15,
        "with model.bidirectional: share of the tokens that are masked, and predicted from all others. The "
        "last id of model.vocab_size stands for a masked token.",
    )
    optimizer: Literal["adamw", "adamw8bit", "muon"] = option(
        "adamw",
        '"adamw"; "adamw8bit", whose moments take 2 bytes per weight instead of 8 (torchao); or "muon" '
        "for the matrices of linear layers except the head, with AdamW for the rest.",
    )
    lr: PositiveNumber = option(
        6e-3,
        "highest learning rate, reached after the warm-up; default 2e-5 with model.from_pretrained, 2e-4 "
        "with model.lora.",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine",
        'learning rate after the warm-up: "cosine" and "linear" decay to min_lr; "constant" stays; "wsd" '
        "(warm-up, stable, decay) stays, then decays to min_lr in the last decay_steps.",
    )
    min_lr: NotNegativeNumber | None = option(None, "learning rate at the last step; null is a tenth of lr.")
    warmup_steps: NotNegative | None = option(
        None, "steps of the linear warm-up; null is 10, or half of a shorter run."
    )
    decay_steps: Positive | None = option(None, 'steps of the decay of "wsd"; null is a fifth of the run.')
    weight_decay: NotNegativeNumber = option(
        0.1,
        "weight decay, on matrices and convolution kernels only, never on norms, biases, scales, time "
        "scales, token shifts and embeddings; "
        "default 0 with model.from_pretrained.",
    )
    betas: Betas = option((0.9, 0.95), "AdamW's betas, the decay rates of its two moments.")
    eps: PositiveNumber = option(1e-8, "AdamW's epsilon.")
    grad_clip: NotNegativeNumber = option(1.0, "clip the gradient to this L2 norm; 0 for no clipping.")
    grad_accumulation: Positive = option(1, "batches whose gradients are summed for one optimizer step.")
    optimizer_in_backward: bool = option(
        False,
        "step each parameter as soon as its gradient is complete, inside the backward. Saves memory with "
        '"backprop" and "mini-sequence", not with chunked methods, which complete all gradients at the '
        "end. Needs grad_clip 0 and grad_accumulation 1.",
    )
    carry_state: Literal["none", "previous", "other", "noise"] = option(
        "none",
        'recurrent states at the start of a batch: "none", zero; "previous", the final states of the batch '
        'before, whose text each row continues; "other", the final states of another sequence; "noise", '
        "random with the mean and deviation of final states. No gradient flows into them. May "
        'help a model generalize beyond data.seqlen (Buitrago & Gu 2025, "Understanding and improving '
        'length generalization in recurrent models"); docs/convergence.md measures "previous".',
    )
    precision: Precision = option(
        "auto", '"auto" is bfloat16 autocast on CUDA devices with native bfloat16, float32 elsewhere.'
    )
    device: str = option("auto", '"auto" (CUDA if there is a GPU, else the CPU), cpu, cuda, cuda:1, …')
    deterministic: bool | None = option(
        None, "use only deterministic algorithms; null is true on the CPU and false elsewhere."
    )
    threads: Threads | None = option(None, "CPU threads; null keeps PyTorch's default.")
    eval_every: NotNegative = option(50, "steps between evaluations on held-out text; 0: at the end only.")
    save_every: NotNegative = option(50, "steps between checkpoints; 0: at the end only.")
    save_async: bool = option(
        False,
        "write each checkpoint in a thread while training continues. Takes CPU memory for a copy of model "
        "and optimizer. The run waits for the thread before the next checkpoint and at the end.",
    )
    keep_checkpoints: Positive = option(
        2,
        "how many of the newest checkpoints to keep. The checkpoint with the lowest held-out loss is kept "
        "too, if there was an evaluation at its step.",
    )
    log_every: Positive = option(1, "steps between log lines, if there is no terminal for a progress bar.")
    sample_tokens: NotNegative = option(400, "tokens to generate at the end; 0 for no sample.")
    sample_prompt: str | None = option(
        None, "text that the sample continues; null is the beginning of the held-out text."
    )
    sample_temperature: PositiveNumber = option(0.8, "temperature of the sample; lower is more conservative.")
    report_to: Annotated[str, Must("none, or tensorboard, wandb, trackio", are_trackers)] = option(
        "none",
        'trackers for the metrics, besides metrics.jsonl: "none", or tensorboard (event files in the '
        "run's folder), wandb, trackio, separated by commas.",
    )
    profile: NotNegative = option(
        0,
        "number of steps, starting with the second, that torch.profiler records to trace.json in the run's "
        "folder, for chrome://tracing or Perfetto; 0 for none.",
    )

    def __post_init__(self) -> None:
        check_fields("training", self)
        if self.min_lr is not None and self.min_lr > self.lr:
            raise UserError(f"training.min_lr: {self.min_lr} is above training.lr {self.lr}; lower it")
        if self.min_lr is not None and self.schedule == "constant":
            raise UserError("training.min_lr: the schedule constant does not fall; leave it out (null)")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise UserError(f"training.decay_steps: is for wsd, not {self.schedule}; leave it out (null)")
        if self.schedule == "wsd" and self.warmup + self.decay > self.steps:
            both = f"{self.warmup} steps of warm-up and {self.decay} of decay"
            raise UserError(f"training.decay_steps: {both} are more than training.steps {self.steps}")
        if self.optimizer_in_backward and (self.grad_clip or self.grad_accumulation > 1):
            setting = "grad_clip 0" if self.grad_clip else "grad_accumulation 1"
            raise UserError(
                "training.optimizer_in_backward: steps before all gradients are complete, which "
                f"{setting.split()[0]} needs; set --training.{setting}"
            )
        if self.optimizer == "adamw8bit" and self.precision == "float64":
            raise UserError("training.optimizer: adamw8bit computes in float32; use adamw for float64")

    @property
    def carries_states(self) -> bool:
        """Whether batches begin with states, but for the first."""
        return self.carry_state != "none"

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return min(10, self.steps // 2) if self.warmup_steps is None else self.warmup_steps

    @property
    def decay(self) -> int:
        """Steps of the decay of "wsd"."""
        return -(-self.steps // 5) if self.decay_steps is None else self.decay_steps

    @property
    def lowest(self) -> float:
        """The learning rate at the last step."""
        if self.schedule == "constant":
            return self.lr
        return self.lr / 10 if self.min_lr is None else self.min_lr


@documented
@dataclass(frozen=True)
class RunConfig:
    """The folder of a run, and whether it continues an earlier one."""

    dir: PathText | None = option(
        None,
        "folder of the run, or an address such as s3://bucket/run; null is runs/NAME, or runs/NAME-2, … if "
        "that exists.",
    )
    name: FolderName | None = option(
        None, "the NAME of runs/NAME; null is the name of the configuration file."
    )
    resume: Text = option(
        "never",
        '"never" starts from scratch; "auto" continues from the newest good checkpoint of the run, if '
        "there is one; or the path of a checkpoint, or of a folder that torch.distributed.checkpoint wrote. "
        "`--resume` is short for `--run.resume`.",
    )

    def __post_init__(self) -> None:
        check_fields("run", self)


@documented
@dataclass(frozen=True)
class ClusterConfig:
    """Training over several processes."""

    shards: NotNegative | Literal["auto"] = option(
        0,
        'layer shards (pipeline parallel), a process each; 0 trains in this process, without Ray; "auto": as '
        "many as fit in the cluster of RAY_ADDRESS (inside a job), or else on this machine.",
    )
    replicas: Positive = option(
        1,
        "data-parallel copies of the pipeline, each with at least one row of every batch. Gradients are "
        "summed over them; losses and weights equal those of one replica, to rounding.",
    )
    sequence: Positive = option(
        1,
        "context-parallel workers that share each sequence: they get its chunks in turn, and each holds the "
        "whole model (or its shard's layers).",
    )
    tensor: Positive = option(
        1,
        "tensor-parallel processes that split each weight and work on the same rows: torchrun "
        "--nproc-per-node N train.py --cluster.tensor N. A model.from_pretrained is split by transformers' "
        "plan for its class.",
    )
    helpers: NotNegative = option(
        0, "extra processes per replica that take tasks from the shards; layer-local only."
    )
    cpus: Threads | None = option(
        None,
        "CPUs that each process requests, and its threads; null requests one, and processes on a node "
        "share its cores. training.threads overrides the threads.",
    )
    transport: Literal["auto", "gloo", "nccl"] = option(
        "auto", 'how tensors are sent between shards; "auto" is nccl between whole GPUs, gloo elsewhere.'
    )
    max_failures: NotNegative = option(
        3,
        "how many times lost shards are restarted, from the last checkpoint, before the run stops; "
        "preempted machines do not count.",
    )
    start_timeout: PositiveNumber = option(300.0, "seconds to wait for free resources for the shards.")
    hang_timeout: PositiveNumber = option(
        60.0, "seconds without a heartbeat after which a shard counts as lost."
    )
    progress_timeout: PositiveNumber = option(
        1800.0,
        "seconds without a finished action on any live shard, after which the shards that are not waiting "
        "(or all) count as lost. Must be longer than any tile or gradient all-reduce takes.",
    )

    def __post_init__(self) -> None:
        check_fields("cluster", self)
        # Layout refuses invalid combinations; with torchrun, sequence and tensor workers need no shards
        by_torchrun = self.shards == 0 and (self.sequence > 1 or self.tensor > 1)
        _ = (dataclasses.replace(self, sequence=1, tensor=1) if by_torchrun else self).layout

    @property
    def layout(self) -> Layout:
        """The distribution of the run over workers; one shard while "auto" is not resolved yet."""
        shards = 1 if self.shards == "auto" else self.shards
        return Layout(shards, self.sequence, self.replicas, self.helpers, self.tensor)


@documented
@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA) from PEFT: only these are trained (Hu et al. 2021)."""

    rank: Positive = option(8, "rank of each adapter; any model.lora key switches adapters on.")
    alpha: PositiveNumber | None = option(
        None, "an adapter's output is multiplied by alpha / rank; null is twice the rank."
    )
    dropout: Annotated[float, Must("a number in [0, 1)", lambda x: 0 <= x < 1)] = option(
        0.0, "dropout of an adapter's input."
    )
    target_modules: str | list[str] | None = option(
        None,
        'modules that get an adapter, as in PEFT: names, a pattern or "all-linear". null is every linear '
        "layer except the head, the MLPs of models with experts, and dt_proj and out_proj, whose weights "
        "are read past an adapter.",
    )

    def __post_init__(self) -> None:
        check_fields("model.lora", self)


@documented
@dataclass(frozen=True)
class ModelConfig(StackConfig):
    """The model that is trained."""

    from_pretrained: Text | None = option(
        None,
        "folder, or name on the Hugging Face hub, of a causal LM to fine-tune, or an RWKV-7 file (.pth); "
        "it sets the sizes, and the method must be exact, truncated or backprop.",
    )
    trust_remote_code: bool = option(
        False, "whether Python code that comes with model.from_pretrained may run: read it first."
    )
    quantization: Quantization | None = option(
        None,
        'how the weights of model.from_pretrained are quantized under adapters: "4bit" (NF4 with quantized '
        'scales, as in QLoRA) or "8bit" (LLM.int8), by bitsandbytes. A folder that is saved quantized needs '
        "no setting.",
    )
    offload: Literal["none", "weights"] = option(
        "none",
        '"weights" keeps weights, gradients and optimizer in host memory and copies one layer at a time to '
        "the GPU, for a model larger than the GPU (docs/host_weights.md). Recomputes layers, as "
        'method.recompute "full" does.',
    )
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bidirectional is not None and self.from_pretrained is not None:
            raise UserError(
                "model.bidirectional: is for a model from scratch; leave model.from_pretrained out"
            )
        if self.trust_remote_code and self.from_pretrained is None:
            raise UserError("model.trust_remote_code: is for a pretrained model, model.from_pretrained")
        if self.lora is not None and self.from_pretrained is None:
            raise UserError("model.lora: adapters need a pretrained model, model.from_pretrained")
        if self.quantization is not None and self.from_pretrained is None:
            raise UserError("model.quantization: is for a pretrained model, model.from_pretrained")
        if self.offload != "none" and self.quantization is not None:
            raise UserError("model.offload: quantized weights stay on the GPU; leave model.quantization out")


# Of a run from scratch, where they are not those of `StackConfig`.
_D_MODEL, _N_LAYER = 128, 2
_DEFAULT_METHOD = "exact"


@dataclass(frozen=True)
class Config:
    """Everything a run needs. ``Config()`` equals ``configs/default.yaml``, small enough to learn something
    on two cores in minutes."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(d_model=_D_MODEL, n_layer=_N_LAYER))
    method: Method = field(default_factory=METHODS[_DEFAULT_METHOD])
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def to_dict(self) -> dict[str, Values]:
        """Nested plain values (numbers, strings, lists, None), complete: every key of this run."""
        method = {"name": self.method.name, **dataclasses.asdict(self.method)}
        return plain(dataclasses.asdict(self) | {"method": method})

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``--config`` reads back to an equal configuration."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_config(argv: list[str], prog: str = "adjoint train") -> Config:
    """Read ``--config FILE`` (any number; later ones override), environment variables such as
    ``ADJOINT_TRAINING__STEPS`` (override files) and ``--section.key value`` flags (override both).

    Raises:
        UserError: one line naming the flag, file or variable, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``, ``--help-all`` or ``--print_config``.
    """
    options, values, from_environment = _read_values(argv, prog)
    if from_environment:
        print(f"from the environment: {', '.join(from_environment)}", file=sys.stderr)
    if values.get("run.name") is None:
        values["run.name"] = Path(options.config[-1]).stem if options.config else "default"
    config = _build(values, weights=prog != "adjoint plan")
    if options.print_config:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def check_values(argv: list[str], prog: str) -> None:
    """Check all that `load_config` does, but for the model's section, which needs torch.

    Raises:
        UserError: as `load_config` does.
    """
    by_section = _by_section(_read_values(argv, prog)[1])
    tuned = _fine_tuning(by_section["model"])
    for section, values in by_section.items():
        if section != "model":
            _make_section(section, tuned.get(section, {}) | values)


def _read_values(argv: list[str], prog: str) -> tuple[argparse.Namespace, Values, list[str]]:
    """Return the options, the values of the keys in files, environment and flags, and what the environment
    gives, as VARIABLE=text.

    Raises:
        UserError: there is no such flag, key or file, or a value does not fit its key.
    """
    options, unknown = _parser(prog, "--help-all" in argv).parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        if re.match("--.", name):
            raise _unknown(name[2:], name)
        if name.endswith((".yaml", ".yml")):
            raise UserError(f"{name}: not a flag; a file of keys is given as --config {name}")
        raise UserError(f"{unknown[0]!r}: not a flag; keys are given as --section.key value (see --help)")
    entries = [
        (name, value, file) for file in options.config for name, value in file_values(file, known_keys())
    ]
    entries += (from_environment := [each for each in _environment() if each[0] not in vars(options)])
    entries += [(name, text, None) for name, text in vars(options).items() if "." in name]
    keys, values = known_keys(), Values()
    for name, value, file in entries:
        origin = f"--{name}" if file is None else f"{file}: {name}"
        if name not in keys:
            raise _unknown(name, file)
        try:
            values[name] = read_value(value, keys[name].hint)
        except ValueError as error:
            default = keys[name].default
            example = "" if default is None else f"; its default is {json.dumps(default)}"
            raise UserError(f"{origin}: {error}{example}") from None
    return options, values, [f"{variable}={text}" for _, text, variable in from_environment]


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON: tuples as lists, paths as text."""
    return json.loads(json.dumps(value, default=str))


@dataclass(frozen=True)
class Setting:
    """A key: the annotation of its values, its default and its help text."""

    hint: Any
    default: Any
    help: str


@functools.cache
def flags_of_keys() -> dict[str, str | int | None]:
    """Map each flag of `load_config` to the number of its values, as argparse's `nargs` has it."""
    actions = _parser("adjoint train")._actions
    return {flag: action.nargs for action in actions for flag in action.option_strings}


@functools.cache
def known_keys() -> dict[str, Setting]:
    """Map the dotted name of each configuration key to its setting."""
    keys: dict[str, Setting] = {}
    for section, cls in hints_of(Config).items():
        defaults = {"d_model": _D_MODEL, "n_layer": _N_LAYER} if section == "model" else {}
        section_keys = _method_keys() if section == "method" else _keys_of(cls, defaults)
        keys |= {f"{section}.{name}": key for name, key in section_keys.items()}
    return keys


def _method_keys() -> dict[str, Setting]:
    """Return the keys of all methods together."""
    keys = {"name": Setting(Literal[tuple(METHODS)], _DEFAULT_METHOD, "how the gradient is computed")}
    takers: dict[str, list[str]] = {}
    for method, cls in METHODS.items():
        for name, key in _keys_of(cls).items():
            first = keys.get(name, key)
            takers.setdefault(name, []).append(method)
            keys[name] = Setting(first.hint | key.hint | None, None, first.help or key.help)
    for name, methods in takers.items():
        text = f"{keys[name].help} Used by {', '.join(methods)}.".strip()
        keys[name] = dataclasses.replace(keys[name], help=text)
    return keys


def _keys_of(cls: type, changed: Mapping[str, int] = MappingProxyType({})) -> dict[str, Setting]:
    """Return the fields of a dataclass and of nested dataclasses as settings.

    Args:
        changed: defaults that take the place of the fields' own.
    """
    keys, helps = dict[str, Setting](), helps_of(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)} | dict(changed)
    for name, hint in hints_of(cls).items():
        inner = next((t for t in get_args(hint) if isinstance(t, type) and dataclasses.is_dataclass(t)), None)
        if inner is None:
            default = None if defaults[name] is dataclasses.MISSING else defaults[name]
            keys[name] = Setting(hint, default, helps.get(name, ""))
        else:
            keys |= {f"{name}.{key}": value for key, value in _keys_of(inner).items()}
    return keys


# The keys that `adjoint train --help` shows; --help-all shows all.
_FIRST_KEYS = (
    "data.path",
    "data.seqlen",
    "data.batch",
    "model.from_pretrained",
    "model.lora.rank",
    "method.name",
    "training.steps",
    "training.lr",
    "run.dir",
    "run.resume",
)


def _parser(prog: str, show_all: bool = False) -> Flags:
    parser = Flags(
        prog=prog,
        usage="%(prog)s [--config FILE] [--section.key VALUE ...] [--resume auto]",
        description="Train or fine-tune a language model on long text.",
        epilog="Whole numbers may be written 16K (16,384) or 1M (1,048,576). YAML files take the same keys; "
        "environment variables (ADJOINT_TRAINING__STEPS=2) override them, flags override both.",
        argument_default=argparse.SUPPRESS,
    )
    show = "show all keys, by section, and exit"
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS if show_all else show)
    first = parser.add_argument_group("keys", "The ten that most runs need.")
    text = "YAML file with any of the keys below"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help=text)
    parser.add_argument(
        "--print_config", action="store_true", default=False, help="print all keys as YAML and exit"
    )
    about = {section: inspect.getdoc(cls) or "" for section, cls in hints_of(Config).items()}
    about["method"] = "How the gradient is computed. null is the method's own default."
    groups: Values = {
        section: parser.add_argument_group(section, " ".join(text.partition("\n\n")[0].split()))
        for section, text in about.items()
        if show_all
    }
    keys = known_keys()
    for name in [*_FIRST_KEYS, *(name for name in keys if name not in _FIRST_KEYS)]:
        key = keys[name]
        about_key = re.sub(r"\bNone\b", "null", key.help)  # the help is of Python's classes too
        text = f"{about_key} ({in_words(key.hint)}; default: {json.dumps(key.default)})".replace("%", "%%")
        group = first if name in _FIRST_KEYS else groups.get(name.partition(".")[0], parser)
        options: Values = {"dest": name, "metavar": "VALUE", "help": text}
        if group is parser:
            options["help"] = argparse.SUPPRESS
        if name == "run.resume":
            group.add_argument("--run.resume", "--resume", nargs="?", const="auto", **options)
        else:
            group.add_argument(f"--{name}", **options)
    return parser


def _environment() -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key, value and name of each environment variable ADJOINT_SECTION__KEY."""
    spelled = {name.lower(): name for name in known_keys()}
    pattern = re.compile(f"ADJOINT_(.*__|({'|'.join(hints_of(Config))})_)", re.IGNORECASE)
    for variable, text in sorted(os.environ.items()):
        if pattern.match(variable):
            name = variable.removeprefix("ADJOINT_").replace("__", ".").lower()
            yield spelled.get(name, name), text, variable


def _pretrained(default: ModelConfig, settings: Values) -> ModelConfig:
    """Return the sizes of a Hugging Face model; sizes that are also given must agree with them."""
    from adjoint.train.pretrained import sizes

    keys = ("from_pretrained", "lora", "offload", "quantization", "trust_remote_code")
    ours = {key: settings.pop(key) for key in keys if key in settings}
    model_sizes: Values = sizes(ours["from_pretrained"], ours.get("trust_remote_code", False))
    for key, value in settings.items():
        if value != model_sizes.get(key, getattr(default, key)):
            raise UserError(f"model.{key}: model.from_pretrained has its own; leave {value} out")
    return dataclasses.replace(default, **ours, **model_sizes)


def _unknown(name: str, origin: str) -> UserError:
    return unknown_key(name, origin, known_keys())


def _method(name: str, settings: Values) -> Method:
    """Return the method of `adjoint.methods` with the given arguments; None keeps the method's default."""
    fields = {method: {f.name: f.default for f in dataclasses.fields(cls)} for method, cls in METHODS.items()}
    arguments = {key: value for key, value in settings.items() if value is not None}
    for key in sorted(arguments.keys() - fields[name].keys()):
        takers = [method for method in METHODS if key in fields[method]]
        if arguments.pop(key) in [fields[method][key] for method in takers]:
            continue  # a run's file lists all its method's arguments, and a flag may choose another method
        raise UserError(
            f"method.{key}: the method {name!r} takes no {key} (taken by: {', '.join(takers)}); "
            f"set --method.{key} null or choose another --method.name"
        )
    for key, default in fields[name].items():
        if default is dataclasses.MISSING and key not in arguments:
            raise UserError(f"method.{key}: the method {name!r} needs it; give --method.{key} VALUE")
    try:
        return METHODS[name](**arguments)
    except ValueError as error:
        raise UserError(f"method ({name}): {error}") from error


def _by_section(values: Values) -> dict[str, Values]:
    """Return values by section and key, from values by dotted name."""
    by_section: dict[str, Values] = {section: {} for section in hints_of(Config)}
    for key, value in values.items():
        section, *outer, name = key.split(".")
        inner = by_section[section].setdefault(outer[0], {}) if outer else by_section[section]
        inner[name] = value
    return by_section


def _fine_tuning(model: Values) -> dict[str, Values]:
    """Return the defaults by section that are others with these values of the model's keys."""
    if model.get("from_pretrained") is None:
        return {}
    return {"training": FINE_TUNING | ({"lr": 2e-4} if "lora" in model else {})}


def _make_section(section: str, values: Values) -> Any:
    """Return a section with the given values; all others are the default's.

    Raises:
        UserError: values do not go together.
    """
    default = Config.__dataclass_fields__[section].default_factory()  # type: ignore[operator]
    try:
        if section == "method":
            return _method(values.pop("name", default.name), values)
        if section == "model" and values.get("from_pretrained") is not None:
            return _pretrained(default, values)
        return dataclasses.replace(default, **values)
    except ValueError as error:
        text = str(error)
        raise UserError(text if text.startswith(section) else f"{section}: {text}") from error


def _build(values: Values, weights: bool = True) -> Config:
    """Return the configuration with the given dotted keys; all others have their defaults. `weights`: whether
    to download the weights of a model on the hub."""
    by_section = _by_section(values)
    tuned = _fine_tuning(by_section["model"])
    if (directory := by_section["model"].get("from_pretrained")) is not None:
        from adjoint.data.tokenizer import tokenizer_in
        from adjoint.train.pretrained import folder_of

        directory = by_section["model"]["from_pretrained"] = folder_of(directory, weights)
        tuned["data"] = {"tokenizer": tokenizer_in(directory)}
    sections = {
        section: _make_section(section, tuned.get(section, {}) | values)
        for section, values in by_section.items()
    }
    model: ModelConfig = sections["model"]
    for name in model.unread_options() if directory is None else ():
        warnings.warn(
            f"model.{name} is for {READERS[name]}; no layer reads it with model.mixer {model.mixer}: leave "
            "it out, or change model.mixer",
            stacklevel=4,
        )
    return Config(**sections)
