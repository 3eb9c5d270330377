"""Each contract held from outside: a stage, a way to hold weights, a method and a way to distribute, defined
here with nothing but their base classes, train exactly; models in formats defined here go in and out. Copy
one of them to begin your own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import adjoint
from adjoint.batch import Batch, State
from adjoint.cli import main
from adjoint.engine import tile
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Head, Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.sweep import ContextFactory, Sweep
from adjoint.engine.tile import Gradients, Pullback
from adjoint.engine.weights import Weights
from adjoint.formats import FILE_FORMATS, FORMATS
from adjoint.formats.format import FileFormat, StackFormat
from adjoint.methods import Method, wrapped_spec
from adjoint.parallel import access
from tests.formats.test_pretrained import as_run
from tests.hf.hf_models import float64_throughout, make
from tests.model_helpers import assert_same, current_gradients, error, make_ids, make_model
from tests.ranks import on_ranks
from tests.training_helpers import train_tiny


def train(model: Any, ids: Tensor, method: Any) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a `Stack` by a method."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, method=method).loss
    loss.backward()
    return loss.item(), current_gradients(model)


# ------------------------------------------------------------------------------------------------- a stage


class LeakyIntegrator(Stage):
    """h_t = a ⊙ h_{t−1} + W x_t, y_t = x_t + h_t: from hidden states (batch, tokens, width) to such."""

    stateful = True
    grows = (None,)  # the state is replaced, not appended to

    def __init__(self, layer: nn.Linear, decay: nn.Parameter) -> None:
        self.layer, self.decay = layer, decay

    def parameters(self) -> Iterable[Tensor]:
        return self.layer.weight, self.decay

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return integrate(self.layer.weight, self.decay, x, state)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            return integrate(*leaves, x, state)

        return tile.linearize(call, list(self.parameters()), x, state, gradients)


def integrate(weight: Tensor, decay: Tensor, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the outputs of `LeakyIntegrator` and its state after the last token."""
    (h,), outputs = state, list[Tensor]()
    for x_t in x.unbind(1):
        h = decay * h + x_t @ weight.T
        outputs.append(x_t + h)
    return torch.stack(outputs, 1), (h,)


def test_a_stage() -> None:
    stack, ids = make_model("mamba"), make_ids(2, 23)
    width = stack.config.d_model
    layer = nn.Linear(width, width, bias=False).double()
    decay = nn.Parameter(torch.linspace(0.5, 0.99, width, dtype=torch.float64))
    parameters = [layer.weight, decay, *stack.embedding.parameters(), *stack.norm_f.parameters()]
    h = torch.zeros(2, width, dtype=torch.float64)

    y, _ = integrate(layer.weight, decay, stack.embed(ids), (h,))
    batch = Batch.from_labels(ids, ids, states=[(), (h,), ()])
    loss = stack.head_loss(y, batch.targets) / batch.divisor
    gradients = torch.autograd.grad(loss, parameters)

    stages = [stack.stages()[0], LeakyIntegrator(layer, decay), Head(stack)]
    by_chunks = ChunkedStep(stages, batch, EngineSpec(chunk_size=5), width).loss().loss
    assert by_chunks.item() == pytest.approx(loss.item(), rel=1e-12)
    expected = dict(enumerate(gradients))
    assert_same(dict(enumerate(torch.autograd.grad(by_chunks, parameters))), expected, 1e-10)


# ------------------------------------------------------------------------------------------------- weights


class PackedWeights(Weights):
    """Weights that have memory only while a model runs: between, all are in one buffer, `model.packed`."""

    name: ClassVar[str] = "packed weights"
    can_copy: ClassVar[bool] = False

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return "packed" in vars(model)

    def run(self, call: Callable[[], Any]) -> Any:
        with self.unpacked():
            return call()

    def sweep(self, backward_context: ContextFactory = contextlib.nullcontext) -> Sweep:
        return PackedSweep(self)

    def loss_and_gradients(
        self, parameters: Sequence[Tensor], compute_loss: Callable[[], Tensor]
    ) -> tuple[float, dict[Tensor, Tensor]]:
        with self.unpacked():
            return super().loss_and_gradients(parameters, compute_loss)

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Give the weights their memory for the time of the context, which may be entered again."""
        parameters = [p for p in self.model.parameters() if p.untyped_storage().nbytes() == 0]
        for p, values in zip(parameters, vars(self.model)["packed"], strict=False):
            p.untyped_storage().resize_(values.nbytes)
            p.data.copy_(values)  # a write that autograd does not count: the tape of the last chunk waits
        try:
            yield
        finally:
            for p in parameters:
                p.untyped_storage().resize_(0)


class PackedSweep(Sweep):
    """A step whose weights have memory while its programs run."""

    def __init__(self, weights: PackedWeights) -> None:
        super().__init__()
        self.weights = weights

    def running(self) -> contextlib.AbstractContextManager[object]:
        return self.weights.unpacked()


def pack(model: nn.Module) -> None:
    vars(model)["packed"] = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.untyped_storage().resize_(0)


@pytest.fixture
def packed_weights() -> Iterator[None]:
    access.KINDS.insert(0, PackedWeights)
    yield
    access.KINDS.remove(PackedWeights)


@pytest.mark.usefixtures("packed_weights")
def test_a_way_to_hold_weights_of_a_stack() -> None:
    model, ids = make_model("mixed, untied"), make_ids(2, 23)
    loss, gradients = train(model, ids, adjoint.Backprop())
    pack(model)
    packed_loss, packed = train(model, ids, adjoint.Exact(5))
    assert packed_loss == pytest.approx(loss, rel=1e-12)
    assert_same(packed, gradients, 1e-10)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())


# ------------------------------------------------------------------------------------------------ a method


@dataclasses.dataclass(frozen=True)
class Halves(Method):
    """Exact gradients of a sequence cut in the middle: what its chunk size is depends on the length."""

    name: ClassVar[str] = "halves"

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        if documents is not None:
            return wrapped_spec(self, seqlen, default, documents)
        return EngineSpec(chunk_size=-(-seqlen // 2))


def test_a_method_of_a_stack_and_of_a_wrapped_model() -> None:
    model, ids = make_model("mixed, untied"), make_ids(2, 23)
    loss, gradients = train(model, ids, adjoint.Backprop())
    halves_loss, halves = train(model, ids, Halves())
    assert halves_loss == pytest.approx(loss, rel=1e-12)
    assert_same(halves, gradients, 1e-10)

    wrapped = make("Mamba2ForCausalLM")
    with float64_throughout():
        wrapped(input_ids=ids, labels=ids).loss.backward()
        gradients = current_gradients(wrapped)
        wrapped.zero_grad()
        adjoint.wrap(wrapped, Halves())(input_ids=ids, labels=ids).loss.backward()
    assert_same(current_gradients(wrapped), gradients, 1e-10)


# ------------------------------------------------------------------------------------- a way to distribute


class RowsOverRanks(Distribution):
    """Each rank of the default group runs some rows of the batch; loss and gradients are of all rows."""

    is_alone: ClassVar[bool] = False

    def results(self, executor: Executor, sums: Sequence[Sum]) -> tuple[Tensor, list[State]]:
        total, final = super().results(executor, sums)
        dist.all_reduce(total)
        return total, final

    def summed(
        self, terms: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> Sequence[Tensor | None]:
        totals = [zeros(i) if term is None else term.clone() for i, term in enumerate(terms)]
        for total in totals:
            dist.all_reduce(total)
        return totals


def rows_over_ranks() -> None:
    model, ids = make_model("mixed, untied"), make_ids(2 * dist.get_world_size(), 23)
    loss, gradients = train(model, ids, adjoint.Backprop())
    model.zero_grad(set_to_none=True)
    rows = ids[dist.get_rank() :: dist.get_world_size()]
    states = model.stage_states(model.initial_state(len(rows)))
    batch = dataclasses.replace(Batch.from_labels(rows, rows, states=states), divisor=ids.numel() - len(ids))
    step = ChunkedStep(
        model.stages(), batch, EngineSpec(5), model.config.d_model,
        distribution=RowsOverRanks(), sweep=access.weights_of(model).sweep(ModuleTensors(model).restored),
    )  # fmt: skip
    shared = step.loss().loss
    shared.backward()
    assert shared.item() == pytest.approx(loss, rel=1e-12)
    assert_same(current_gradients(model), gradients, 1e-10)


def test_a_way_to_distribute(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, rows_over_ranks)


# ------------------------------------------------------------------------------------- a format of a file


class PackedFile:
    """A Mamba-2 of transformers in one file: its configuration, then its tensors."""

    KIND, SUFFIX, SUMMARY, LIBRARY = "a packed file", ".packed", "Mamba-2, packed", "transformers"
    WHY_NOT_SHARDED: str | None = "shards do not read packed files"

    def holds(self, place: Path) -> bool:
        return place.suffix == self.SUFFIX and place.is_file()

    def sizes_of_file(self, file: Path) -> dict[str, Any]:
        return torch.load(file)["sizes"]

    def configuration(self, file: Path) -> Any:
        return transformers.Mamba2Config(**self.sizes_of_file(file))

    def load(self, file: Path, dtype: torch.dtype | None) -> Any:
        model = transformers.Mamba2ForCausalLM(self.configuration(file))
        model.load_state_dict(torch.load(file)["weights"])
        return model.to(dtype)

    def stored_dtypes(self, file: Path) -> dict[str, tuple[torch.dtype, int]]:
        return {name: (t.dtype, t.numel()) for name, t in torch.load(file)["weights"].items()}

    def save(self, model: Any, file: Path, dtype: torch.dtype | None) -> None:
        weights = {name: t.to(dtype or t.dtype) for name, t in model.state_dict().items()}
        torch.save({"sizes": model.config.to_diff_dict(), "weights": weights}, file)

    def why_no_folder(self, config: Any) -> str | None:
        return None


@pytest.fixture
def packed_files() -> Iterator[FileFormat]:
    row: FileFormat = PackedFile()
    FILE_FORMATS.append(row)
    yield row
    FILE_FORMATS.remove(row)


@pytest.mark.usefixtures("one_thread", "here")
def test_a_format_of_a_file_in_every_command(
    packed_files: FileFormat,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("adjoint.tools.compare.measure._limit", lambda *_: None)  # of the tests' own process
    model = make("Mamba2ForCausalLM", torch.float32, vocab_size=260)
    file, out, folder = (tmp_path / name for name in ("in.packed", "out.packed", "folder"))
    mixed = {name for name, _ in model.named_parameters() if name.endswith(("A_log", "norm_f.weight"))}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in mixed else torch.bfloat16)
    packed_files.save(model, file, None)
    sizes = {"model__d_model": model.config.hidden_size, "model__n_layer": model.config.num_hidden_layers}
    start: dict[str, Any] = {**sizes, "model__from_pretrained": file, "training__steps": 1}
    assert train_tiny(tmp_path, **start, cluster__shards=1) == 2
    assert "shards do not read packed files; set cluster.shards to 0" in capsys.readouterr().err
    assert train_tiny(tmp_path, **start) == 0
    capsys.readouterr()
    for place, said in ((out, "Mamba-2, packed, "), (folder, "Mamba2ForCausalLM of transformers, ")):
        assert main(["export", str(tmp_path / "run"), "--to", str(place)]) == 0
        assert said in capsys.readouterr().out
    written = torch.load(out)["weights"]
    stored = load_file(folder / "model.safetensors")
    for tensors in (written, stored):  # each has the dtype that it has in the file
        assert {name for name, t in tensors.items() if t.dtype == torch.float32} == mixed
    trained = transformers.Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert_same(packed_files.load(out, torch.float32).state_dict(), trained, 0)
    assert error(trained, model.state_dict()) > 0
    text = ["--path", str(tmp_path / "text.txt"), "--tokens", "64", "--lengths", "64"]
    assert main(["eval", str(out), *text, "--out", str(tmp_path / "eval")]) == 0
    point = ["--lengths", "32", "--ways", "wrapped", "--repeat", "1", "--memory", "1GB"]
    capsys.readouterr()
    assert main(["compare", str(out), *point, "--device", "cpu", "--out", str(tmp_path / "compare")]) == 0
    assert "out.packed, its weights" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- a format of stacks


class NumberedFolder:
    """Folders of a `Stack` whose config.json is its configuration, with tensors named by their places."""

    WEIGHTS_FILE = "pytorch_model.bin"
    WHY_NOT_EVALUATED: str | None = "a folder of numbered tensors"

    def holds(self, config_json: dict[str, Any]) -> bool:
        return config_json.get("model_type") == "numbered"

    def read_config(self, config_json: dict[str, Any]) -> adjoint.StackConfig:
        return adjoint.StackConfig(**config_json["stack"])

    def read_weights(
        self, config_json: dict[str, Any], config: adjoint.StackConfig, weights: dict[str, Tensor]
    ) -> tuple[adjoint.StackConfig, dict[str, Tensor]]:
        return config, {name: weights[str(i)] for i, name in enumerate(config_json["names"])}

    def why_not(self, config: adjoint.StackConfig) -> str | None:
        return None if set(config.mixers) == {"mamba2"} else "numbered tensors are of mamba2 layers"

    def convert(
        self, config: adjoint.StackConfig, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config_json = {"model_type": "numbered", "stack": dataclasses.asdict(config), "names": [*weights]}
        return config_json, {str(i): tensor for i, tensor in enumerate(weights.values())}

    def class_name(self, config_json: dict[str, Any]) -> str:
        return "NumberedTensors"


def test_a_format_of_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row: StackFormat = NumberedFolder()
    monkeypatch.setitem(FORMATS, "numbered", row)
    stack, out = make_model("mamba2"), str(tmp_path / "out")
    run = as_run(tmp_path / "run", stack)
    assert main(["export", str(run), "--to", out, "--format", "numbered"]) == 0
    assert "NumberedTensors of numbered, " in capsys.readouterr().out
    read = adjoint.Stack.from_pretrained(out)
    assert read.config == stack.config
    assert_same(read.state_dict(), stack.state_dict(), 0)
    assert main(["eval", out]) == 2
    assert "out is a folder of numbered tensors; read it with" in capsys.readouterr().err
    other = as_run(tmp_path / "other", make_model("mamba"))
    assert main(["export", str(other), "--to", str(tmp_path / "no"), "--format", "numbered"]) == 2
    assert "are of mamba2 layers; give --format transformers" in capsys.readouterr().err
