"""The training loop: ``train(config)`` in this process; `adjoint.cluster.training` builds on it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adjoint.batch import IGNORE_INDEX, labelled
from adjoint.checkpoint import (
    FileEntry,
    StoredTensors,
    TrainerState,
    list_checkpoints,
    set_aside_after,
    step_of,
)
from adjoint.data.batches import TEXT_KEYS, Data, OtherPlace, open_data
from adjoint.data.masking import EVALUATION, TRAINING, Masking
from adjoint.data.tokenizer import Tokenizer, describe_boundaries
from adjoint.engine.generators import set_torch_states, torch_states
from adjoint.errors import UserError
from adjoint.files import write_atomically
from adjoint.files.remote import Place
from adjoint.layers.init import draw_seed
from adjoint.memory import begin_peak, peak_memory_bytes, release_freed_memory
from adjoint.methods import Method
from adjoint.parallel.split_tensors import local
from adjoint.stack import StackOutput
from adjoint.train import dependencies, machine
from adjoint.train.carry_state import STEM, Carried
from adjoint.train.checkpoint import (
    changed_keys,
    load_checkpoint,
    model_files,
    save_checkpoint,
)
from adjoint.train.config import Config, TrainingConfig
from adjoint.train.gpus import peak_flops
from adjoint.train.language_model import LanguageModel, OutputWithLoss, model_class
from adjoint.train.machine import StopRequest, autocast, terminal_bar
from adjoint.train.metrics import MetricsRow
from adjoint.train.optimizer import SteppedInBackward, learning_rate, make_optimizer, take_step
from adjoint.train.plots import plot_losses
from adjoint.train.quantization import described
from adjoint.train.rundir import RunFolder, open_run, resume_command
from adjoint.train.trackers import Trackers

SAMPLE_PROMPT_TOKENS = 16  # of the held-out text, if no prompt is set
_RESULTS = ("metrics.jsonl", "loss.png", "sample.txt", "trace.json", "config.yaml", "checkpoints/")
Start = tuple[bool, int]  # whether a batch may start from carried states, and the seed of noise
LossAndWindows = tuple[float, list[int] | None]  # of a batch; None unless the method picked the windows


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its folder, the optimizer steps done, and the signal that ended it early."""

    path: Place
    step: int
    stopped_by: int | None = None


def train(config: Config) -> Outcome:
    """Train as configured, from the beginning or from a checkpoint, and leave a finished run folder; a
    UserError for what the user can mend."""
    folder, checkpoint = open_run(config.run)
    with folder:
        return Trainer(config, folder, checkpoint).run()


def masking_of(config: Config, tokenizer: Tokenizer) -> Masking | None:
    """Return how tokens are masked, for a model that reads in both directions; None for other models.

    Raises:
        UserError: the vocabulary has no id besides the tokenizer's.
    """
    if config.model.bidirectional is None:
        return None
    if config.model.vocab_size <= tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size: {config.model.vocab_size} ids are the tokenizer's "
            f"({tokenizer.vocab_size:,}), and model.bidirectional needs one for masked tokens; set it to "
            f"{tokenizer.vocab_size + 1}"
        )
    return Masking(config.training.mask_share, config.training.seed, config.model.vocab_size - 1)


class Trainer:
    """A training run: its model, optimizer, data and run folder; it continues from a checkpoint if there is
    one."""

    # Of the device, if its data sheet is known, and of the products with parameters for a token.
    peak_flops: float | None = None
    flops: float = 0.0
    model: LanguageModel
    saving: Future[Place] | None = None  # of the checkpoint that a thread writes
    in_backward: SteppedInBackward | None = None
    sequence_group: dist.ProcessGroup | None = None  # of processes that share each sequence
    tensor_group: dist.ProcessGroup | None = None  # of processes that share each weight
    writes = True  # the checkpoints' files, or else only gives parts of tensors to the process that does
    begins_again = False  # the next batch is the first of another text, length or batch size
    launcher = ""  # what has started the processes of the run: see `resume_command`

    def __init__(self, config: Config, folder: RunFolder, checkpoint: Place | None) -> None:
        settings = config.training
        self.config, self.settings, self.folder = config, settings, folder
        self.device = machine.pick_device(settings.device)
        self.precision = machine.pick_precision(settings.precision, self.device)
        machine.set_up(settings, self.device)
        on = settings.carry_state == "previous"
        trusted = config.model.trust_remote_code
        vocab_size, folder_name = config.model.vocab_size, config.model.from_pretrained
        self.data: Data = open_data(config.data, settings.seed, vocab_size, on, trusted, folder_name)
        if (
            setting := self.data.tokenizer.setting
        ) is not None:  # so that other commands need not see the text
            data = dataclasses.replace(config.data, tokenizer=setting)
            config = self.config = dataclasses.replace(config, data=data)
        self.method, self.masking = config.method, masking_of(config, self.data.tokenizer)
        self.step = self.saved_step = 0
        self.tokens = 0
        self._build(checkpoint)
        self.dependencies = dependencies.record(config.to_dict()["model"], self.data.tokenizer.files)
        if checkpoint is not None:
            self._resume(checkpoint)
        self.trackers = Trackers(settings.report_to, folder.local, self.step, config.to_dict())
        folder.start(self.step)
        write_atomically(folder.local / "config.yaml", config.to_yaml())

    def run(self) -> Outcome:
        """Do the steps that are left, then evaluate, sample and plot."""
        self._announce()
        release_freed_memory()  # of tokenizing, and of weights as they were read
        trace = self.folder.local / "trace.json"
        with (
            StopRequest() as stop,
            _StepProgress(self.step, self.settings) as progress,
            machine.recorded(trace, self.settings.profile) as recording,
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(self._wait_for_saving)
            while self.step < self.settings.steps and not self._stopped(stop):
                row = self._train_step()
                recording()
                self.folder.append(row)
                progress.show(row)
                self.trackers.show(row)
                if _due(self.step, self.settings.save_every) and self.step < self.settings.steps:
                    self._save()
                    self._plot()
            if self.step != self.saved_step:
                self._save()
        self.folder.check()
        self._plot()
        self.trackers.close()
        path = self.folder.path
        if stop.signal is not None and self.step < self.settings.steps:
            again = resume_command(path, self.launcher)
            print(f"stopped after step {self.step}; continue with: {again}", flush=True)
            return Outcome(path, self.step, stop.signal)
        self._sample()
        if (best := self._best()) is not None:
            print(f"lowest held-out loss: {best['eval_loss']:.4f}, checkpoints/step-{best['step']:08d}")
        self.folder.upload()
        written = [name for name in _RESULTS if (path / name).exists()]
        print(f"run: {path} ({', '.join(written)})", flush=True)
        return Outcome(path, self.step)

    # What is done to model and optimizer is in the next methods and nowhere else: over several processes
    # (`adjoint.cluster.training`) these are others.

    def _build(self, checkpoint: Place | None) -> None:
        """Make model and optimizer; a checkpoint is loaded into them by `_load`."""
        dtype = torch.float64 if self.precision == "float64" else None
        self.carried = Carried(self.settings.carry_state, range(self.config.model.n_layer))
        cls = model_class(self.config.model.from_pretrained)
        self.model = cls.from_config(self.config, self.device, dtype, self.sequence_group, self.tensor_group)
        module = self.model.module
        self.optimizer = make_optimizer(module, self.settings)
        if self.settings.optimizer_in_backward:
            self.in_backward = SteppedInBackward(self.optimizer)
        self.num_parameters = self.model.num_parameters
        self.peak_flops = peak_flops(self.precision, self.device)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.flops = 4 * self.num_parameters + 2 * trained

    @property
    def rows(self) -> int:
        """Rows of a batch that this process works on."""
        return self.config.data.batch

    def _stopped(self, stop: StopRequest) -> bool:
        return stop.signal is not None

    def _picked_method(self) -> Method:
        """Return the method with the chunks and segments of a training batch."""
        with autocast(self.precision, self.device):
            seqlen, has_state = self.config.data.seqlen, self.settings.carries_states
            return self.model.picked_method(self.rows, seqlen, has_state)

    def _zero_grad(self) -> None:
        begin_peak(self.device)  # of this step, without tokenizing, evaluation and checkpoints
        self.optimizer.zero_grad(set_to_none=True)
        if self.in_backward is not None:
            self.in_backward.lr = learning_rate(self.step + 1, self.settings)

    def _gradients(self, ids: torch.Tensor, start: Start, number: int, loss_divisor: float) -> LossAndWindows:
        """Add the gradients of the batch `number`, divided by the batches of a step, to those there are.

        Args:
            ids: (batch, seqlen), see `labelled`. start: `Carried.start`'s arguments.
            loss_divisor: predicted tokens of the step / of this batch.
        """
        carries = self.settings.carries_states
        states = {"state": self.carried.start(*start), "return_state": True} if carries else {}
        with autocast(self.precision, self.device):
            output = self._output(ids, **states)
        if carries:
            state = getattr(output, "state", None)
            assert state is not None
            self.carried.end(state, self.data.ended(ids).to(self.device))
        assert output.loss is not None
        loss = output.loss / loss_divisor
        loss.backward()
        return loss.item(), getattr(output, "windows", None)

    def _output(self, ids: torch.Tensor, **states: object) -> StackOutput | OutputWithLoss:
        """Return the model's output on a batch, by the method."""
        ids = ids.to(self.device)
        tokens, labels = labelled(ids) if self.masking is None else self.masking.inputs(ids)
        return self.model.output(tokens, labels, self.data.seq_idx(ids), **states)

    def _update(self, step: int) -> float:
        """Clip the gradients and step; the gradient's norm before that."""
        if self.in_backward is not None:
            norm = self.in_backward.norm()
            if not math.isfinite(norm):
                self._diverged("gradient norm", norm, step)
            return norm
        if self.config.model.lora is not None and not self.folder.rows:
            self._warn_of_idle_adapters()
        # measures the norm whatever it clips to
        norm = self._clip_gradients(self.settings.grad_clip or math.inf)
        if not math.isfinite(norm):
            self._diverged("gradient norm", norm, step)
        take_step(self.optimizer, learning_rate(step, self.settings))
        return norm

    def _clip_gradients(self, limit: float) -> float:
        """Scale the gradients down to an L2 norm of at most `limit`; return their norm before that."""
        return torch.nn.utils.clip_grad_norm_(self.model.module.parameters(), limit).item()

    def _warn_of_idle_adapters(self) -> None:
        named = self.model.module.named_parameters()
        ends = [(n, p.grad) for n, p in named if p.requires_grad and "lora_B" in n]
        if idle := [name for name, gradient in ends if gradient is None or not local(gradient).any()]:
            warnings.warn(
                f"model.lora.target_modules: {len(idle)} adapters have no gradient, such as "
                f"{idle[0].partition('.lora_B')[0]}, whose weight is read without them; leave them out",
                stacklevel=2,
            )

    def _loss_of(self, ids: torch.Tensor) -> float:
        """Return the mean loss of a batch, without gradients."""
        with autocast(self.precision, self.device):
            loss = self._output(ids).loss
        assert loss is not None
        return loss.item()

    def _files(self) -> Callable[[Path], dict[str, FileEntry]]:
        """Return the function that writes a checkpoint's tensors, as `save_checkpoint` takes it."""
        copied, states = self.settings.save_async, self.carried.tensors()
        return model_files(self.model.module, self.optimizer, states, copied, self.writes)

    def _load(self, checkpoint: Place) -> tuple[TrainerState, dict[str, Any]]:
        """Read a checkpoint that is known to be whole; its (trainer, rng) dictionaries."""
        current = self.config.to_dict()
        self.carried.load(StoredTensors(checkpoint, STEM), self.device)
        return load_checkpoint(checkpoint, self.model.module, self.optimizer, current, verify=False)

    def _peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.device)

    # The rest is the same however many processes there are.

    def _train_step(self) -> MetricsRow:
        started = time.perf_counter()
        step, settings = self.step + 1, self.settings
        loss, tokens, windows = self._accumulate(step)
        norm = self._update(step)
        self.step, self.tokens = step, self.tokens + tokens
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        row: MetricsRow = {
            "step": step,
            "loss": loss,
            "lr": learning_rate(step, settings),
            "grad_norm": norm,
            "tokens": self.tokens,
            "tokens_per_second": tokens / (time.perf_counter() - started),
            "peak_memory_bytes": self._peak_memory_bytes(),
            "time": time.time(),
        }
        if self.peak_flops is not None:
            row["mfu"] = self.flops * row["tokens_per_second"] / self.peak_flops
        if windows is not None:
            row["windows"] = windows
        if (_due(step, settings.eval_every) or step == settings.steps) and len(self.data.eval):
            held_out = self._evaluate()
            if held_out is not None:
                row["eval_loss"] = held_out
        return row

    def _accumulate(self, step: int) -> tuple[float | None, int, list[int] | None]:
        """Fill the gradients from the next batches: the mean loss (None if no token is predicted), tokens,
        each layer's window if picked."""
        batches, carry_state = self.settings.grad_accumulation, self.settings.carry_state
        self._zero_grad()
        loss, tokens, windows = 0.0, 0, None
        drawn: list[tuple[Start, torch.Tensor]] = []
        for number in range((step - 1) * batches, step * batches):
            goes_on = not self.begins_again and (carry_state != "previous" or not self.data.train.begins)
            start = goes_on, draw_seed() if carry_state == "noise" else 0
            self.begins_again = False
            drawn.append((start, self._masked(next(self.data.train), TRAINING, number)))
        counts = [self._predictions(ids) for _, ids in drawn]
        for i, (start, ids) in enumerate(drawn):
            loss_divisor = (
                sum(counts) / counts[i] if counts[i] else math.inf
            )  # as in one batch of all of them
            batch_loss, picked = self._gradients(ids, start, (step - 1) * batches + i, loss_divisor)
            loss += batch_loss
            if not math.isfinite(loss):
                self._diverged("loss", loss, step)
            if picked is not None:  # the widest of the batches
                windows = list(map(max, windows or picked, picked))
            tokens += ids.numel()
        return loss if sum(counts) else None, tokens, windows

    def _masked(self, ids: torch.Tensor, stream: int, number: int) -> torch.Tensor:
        """Return a batch; for a model that reads in both directions, with the tokens to predict chosen."""
        return ids if self.masking is None else self.masking.choose(ids, stream, number)

    def _predictions(self, ids: torch.Tensor) -> int:
        if self.masking is not None:
            return int((ids >= 0).sum())
        return int((self.data.targets(ids) != IGNORE_INDEX).sum())

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Return the mean loss over the held-out text, nats per token; None if no token of it is
        predicted."""
        total, count = 0.0, 0
        for number, text in enumerate(self.data.eval):
            ids = self._masked(text, EVALUATION, number)
            predictions = self._predictions(ids)
            total += self._loss_of(ids) * predictions if predictions else 0.0
            count += predictions
        return total / count if count else None

    def _save(self) -> None:
        self._wait_for_saving()  # so that there is one copy at most
        self.folder.check()
        trainer: TrainerState = {
            "tokens": self.tokens,
            "data": self.data.train.state_dict(),
            "unigram_entropy": self.data.unigram_entropy,
            "torch": torch.__version__,
            "config": self.config.to_dict(),
            dependencies.RECORD: self.dependencies,
        }
        folder = self.folder.path / "checkpoints"
        best, keep = self._best(), self.settings.keep_checkpoints
        spared = None if best is None else best["step"]
        arguments = folder, self.step, self._files(), copy.deepcopy(trainer), torch_states(), keep, spared
        remote = self.folder.remote
        save: Callable[..., Place] = save_checkpoint if remote is None else remote.save_checkpoint
        if self.settings.save_async:
            self.saving = ThreadPoolExecutor(1).submit(save, *arguments)
        else:
            save(*arguments)
        self.saved_step = self.step
        self.folder.upload()

    def _wait_for_saving(self) -> None:
        """Wait until a thread has written its checkpoint, and raise the error that it met, if any."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def _best(self) -> MetricsRow | None:
        """Return the row with the lowest held-out loss of those whose checkpoint is there, or is being
        written."""
        steps_with_checkpoint = {
            step_of(path) for path in list_checkpoints(self.folder.path / "checkpoints")
        } | {self.step}
        rows = [
            row for row in self.folder.rows if "eval_loss" in row and row["step"] in steps_with_checkpoint
        ]
        return min(rows, key=lambda row: row["eval_loss"], default=None)

    def _resume(self, checkpoint: Place) -> None:
        trainer, rng = self._load(checkpoint)  # open_run has compared the checksums already
        begins_again = self._go_to_place(checkpoint, trainer)
        self.step, self.tokens = trainer["step"], trainer["tokens"]
        if checkpoint.absolute().parent == (self.folder.path / "checkpoints").absolute():
            self.saved_step = self.step
        if rng:
            set_torch_states(rng)
        for moved in set_aside_after(self.folder.path / "checkpoints", self.step):
            print(f"set aside: {moved}, because their steps run again")
        print(f"resuming after step {self.step} from {checkpoint}")
        if changed := changed_keys(trainer.get("config", {}), self.config.to_dict()):
            print(f"changed since the checkpoint: {', '.join(changed)}")
        if begins_again:
            print(f"the text begins again: {begins_again}; weights, optimizer and schedule go on")

    def _go_to_place(self, checkpoint: Place, trainer: TrainerState) -> str:
        """Go to the checkpoint's place in the data, or to the beginning if this run's batches are others.

        Return what makes them others, such as longer sequences or text that the user names; "" if nothing.

        Raises:
            UserError: the text has changed, and no setting says so.
        """
        self.begins_again = False
        if "data" not in trainer:  # of another training loop
            return ""
        try:
            self.data.train.load_state_dict(trainer["data"])
        except OtherPlace as error:
            if (text := error.differing.get("data.path")) and not self._names_other_text(trainer):
                raise UserError(
                    f"{checkpoint}: was trained on {text[0]}, data.path has {text[1]} now; put text and "
                    "tokenizer back, or name other text with another --data.path"
                ) from None
            self.begins_again = True
            return ", ".join(f"{key} {new}, was {old}" for key, (old, new) in error.differing.items())
        return ""

    def _names_other_text(self, trainer: TrainerState) -> bool:
        """Whether the settings name other text than the checkpoint's, read by the same tokenizer."""
        current = self.config.to_dict()["data"]
        stored = current | trainer.get("config", {}).get("data", {})
        same_tokenizer = all(stored[key] == current[key] for key in ("tokenizer", "separator"))
        return same_tokenizer and any(stored[key] != current[key] for key in TEXT_KEYS)

    def _plot(self) -> None:
        if self.folder.rows:
            size = f"{self.num_parameters:,} parameters"
            title = f"{self.folder.path.name}: {size}, {self.method.name}"
            plot_losses(self.folder.rows, self.folder.local / "loss.png", self.data.unigram_entropy, title)

    def _sample(self) -> None:
        """Continue the prompt with the trained model; print it and keep it as sample.txt."""
        settings = self.settings
        if settings.sample_tokens == 0 or self.masking is not None:  # it continues no text
            return
        tokenizer = self.data.tokenizer
        if settings.sample_prompt is None:
            prompt = self.data.beginning(SAMPLE_PROMPT_TOKENS)
        else:
            prompt = [*tokenizer.bos_ids, *tokenizer.encode(settings.sample_prompt)]
        prompt = prompt or list(tokenizer.separator_ids) or [0]
        try:
            ids = self.model.continued(torch.tensor([prompt], device=self.device), settings)
        except UserError as error:
            print(f"no sample: {error}")
            return
        # The model may have more rows in its embedding than the tokenizer has tokens.
        text = tokenizer.decode([token for token in ids[0].tolist() if token < tokenizer.vocab_size])
        write_atomically(self.folder.local / "sample.txt", text)
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        print(f"sample:\n{shown}\n")  # never a control sequence to the terminal

    def _diverged(self, quantity: str, value: float, step: int) -> None:
        checkpoint_note = (
            f"the checkpoint of step {self.saved_step} is kept" if self.saved_step else "none is saved yet"
        )
        raise UserError(
            f"{self.folder.path}: the {quantity} became {value} at step {step}, {checkpoint_note}; "
            f"lower training.lr, raise training.warmup_steps or "
            f"{'lower' if self.settings.grad_clip else 'set'} training.grad_clip"
        )

    def _announce(self) -> None:
        data, settings, method = self.data, self.settings, self.method
        picked = method.has_chunks and method.chunk_size is None
        if picked:
            method = self._picked_method()
        answers = "" if data.predicted is None else f", {data.predicted:.1%} of them predicted"
        print(
            f"run: {self.folder.path}\n"
            f"model: {self.num_parameters:,} parameters, {self.config.model.n_layer} layers, "
            f"d_model {self.config.model.d_model}\n"
            f"method: {method.describe(picked)}\n"
            f"data: {data.description}: {data.n_train_tokens:,} tokens to train on{answers}, "
            f"{len(data.eval.tokens):,} held out, unigram entropy {data.unigram_entropy:.4f} nats per token\n"
            f"tokenizer: {data.tokenizer.name}, {data.tokenizer.vocab_size:,} tokens, "
            f"{describe_boundaries(data.tokenizer)}\n"
            f"training: {settings.steps} steps of {self.config.data.batch * settings.grad_accumulation} x "
            f"{self.config.data.seqlen:,} tokens on {self.device} in {self.precision}\n"
            f"optimizer: {settings.optimizer}, learning rate {settings.lr:g} ({settings.schedule} to "
            f"{settings.lowest:g}, warm-up {settings.warmup} steps), weight decay {settings.weight_decay:g}",
            flush=True,
        )
        if settings.warmup > settings.steps:
            print(
                f"note: the run ends within its warm-up, below training.lr: set --training.warmup_steps 0 to "
                f"{settings.steps}"
            )
        pretrained, lora = self.config.model.from_pretrained, self.config.model.lora
        if lora is not None:
            from adjoint.train.peft_adapters import tied_modules

            trained = sum(p.numel() for p in self.model.module.parameters() if p.requires_grad)
            stored = f", quantized ({kind})" if (kind := described(self.model.module.config)) else ""
            print(f"adapters: rank {lora.rank}, {trained:,} parameters; the model's own are frozen{stored}")
            if shared := tied_modules(self.model.module):
                also = f", and {len(shared) - 1} more such weights" if len(shared) > 1 else ""
                print(
                    f"note: {' and '.join(shared[0])} share a weight{also}, and one of them has an adapter: "
                    "an export has a weight for each"
                )
        if pretrained is not None and self.config.data.tokenizer is None:
            print(f"note: {pretrained} has no tokenizer: the text is read as bytes (--data.tokenizer)")
        unused = self.config.model.vocab_size - data.tokenizer.vocab_size
        if self.masking is not None:
            print(
                f"objective: {self.masking.share:.0%} of the tokens are masked (id {self.masking.mask_id}) "
                "and predicted from all others"
            )
            unused -= 1
        if pretrained is None and unused > 0:
            print(
                f"note: the tokenizer has {data.tokenizer.vocab_size:,} tokens and model.vocab_size is "
                f"{self.config.model.vocab_size:,}; --model.vocab_size {data.tokenizer.vocab_size} is enough"
            )
        left = settings.steps - self.step
        for line in data.describe_unpredicted(left, settings.grad_accumulation):
            warnings.warn(line, stacklevel=2)
        if self.step >= settings.steps:
            print(f"note: all {settings.steps} steps are done; raise training.steps to continue")


class _StepProgress:
    """A bar on a terminal; elsewhere one line on stdout every ``log_every`` steps."""

    def __init__(self, step: int, settings: TrainingConfig) -> None:
        self.first, self.settings, self.started = step, settings, time.monotonic()
        self.bar = terminal_bar(settings.steps, "step", initial=step, smoothing=0.1)

    def __enter__(self) -> _StepProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, row: MetricsRow) -> None:
        held_out = f"held-out {row['eval_loss']:.4f}  " if "eval_loss" in row else ""
        speed = f"{row['tokens_per_second']:,.0f} tokens/s  peak {row['peak_memory_bytes'] / 2**30:.2f} GiB"
        step, last = row["step"], self.settings.steps
        loss = "no token predicted" if row["loss"] is None else f"loss {row['loss']:.4f}"
        norm = "" if row["loss"] is None else f"grad norm {row['grad_norm']:.2f}  "
        if self.bar is not None:
            self.bar.set_postfix_str(f"{loss}  {speed}")
            self.bar.update()
            if held_out:
                self.bar.write(f"step {step}: {held_out}")
        elif held_out or step == last or _due(step, self.settings.log_every):
            left = int((time.monotonic() - self.started) / (step - self.first) * (last - step))
            print(
                f"step {step}/{last}  {loss}  {held_out}lr {row['lr']:.2e}  "
                f"{norm}{speed}  left {left // 60}:{left % 60:02d}",
                flush=True,
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
