"""What is refused: exit code 2 and one line on stderr that names the fault and the remedy.

A row is a command line, put behind that of a run that would work, and what is said of it. Paths are files of
`FILES`, in the folder where the command runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adjoint.methods import METHODS
from tests.training_helpers import run, tiny, train_tiny

FILES: dict[str, bytes] = {
    "short.txt": b"abc",
    "longer.txt": b"x" * 60,
    "empty.txt": b"",
    "latin.txt": b"good \xff bad",
    "folder/a.pdf": b"x",
    "a.pdf": b"x",
    "cut.jsonl": b'{"text": "a"}\n{"text": ',
    "list.jsonl": b'{"text": "a"}\n\n[1]',
    "body.jsonl": b'{"body": "a"}',
    "number.jsonl": b'{"text": 5}',
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}',
    "roles.jsonl": b'{"messages": ["a"]}',
    "half.jsonl": b'{"text": "\\ud800"}',
    "half_chat.jsonl": b'\n{"messages": [{"role": "user", "content": "hi \\ud83d"}]}',
    "half_call.jsonl": b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": '
    b'"{\\"city\\": \\"\\\\ud83d\\"}"}]}]}',
    "latin.jsonl": b'{"text": "\xff"}',
    "digits.jsonl": b'{"text": "a"}\n{"n": ' + b"1" * 5000 + b"}",
    "not.txt.gz": b"not gzip",
    "cut.txt.gz": gzip.compress(b"x" * 9999)[:-20],
    "not.txt.zst": b"not zstd",
    "cut.txt.zst": bytes.fromhex("28b52ffd2478"),
    "not.parquet": b"PAR1 nonsense PAR1",
    "object.json": b"{}",
    "not.json": b"not json",
    "binary.json": b"\xff\xfe",
    "stepz.yaml": b"training:\n  stepz: 3\n",
    "section.yaml": b"trainingg: {steps: 3}\n",
    "null.yaml": b"training:\n  lr: null\n",
    "steps.yaml": b"training:\n  steps: two\n",
    "list.yaml": b"training:\n  lr: [1]\n",
    "bare.yaml": b"training:\n",
    "sections.yaml": b"- training\n",
    "empty.yaml": b"",
    "not.yaml": b"training: [\n",
    "twice.yaml": b"training: {lr: 1}\ndata: {batch: 2}\ntraining: {steps: 2}\n",
    "flat.yaml": b"seqlen: 5\n",
    "adapter/adapter_config.json": b'{"base_model_name_or_path": "some/base"}',
    "other/checkpoints/step-00000003/MANIFEST.json": b"{",
}
STEP = "run/checkpoints/step-00000001"
KEYS = [
    ("--training.stepz 3", "--training.stepz: unknown key training.stepz; did you mean training.steps?"),
    ("--training.optimizer_in_backward true", "needs; set --training.grad_clip 0"),
    (
        "--training.optimizer_in_backward true --training.grad_clip 0 --training.grad_accumulation 2",
        "needs; set --training.grad_accumulation 1",
    ),
    ("--foo 3", "--foo: unknown key foo (--help-all lists all keys)"),
    ("--lr 3", "did you mean training.lr?"),
    ("--learning_rate 3", "did you mean training.lr?"),
    ("--per_device_train_batch_size 3", "did you mean data.batch?"),
    ("--training.lr_scheduler_type linear", "did you mean training.schedule?"),
    ("--bf16 true", "unknown key bf16; here it is training.precision bfloat16"),
    ("--num_train_epochs 3", "unknown key num_train_epochs; a run is training.steps long"),
    ("--epochs 3", "unknown key epochs; a run is training.steps long"),
    ("--model mamba", "name a kind of layer with model.mixer, a model of transformers with model.from_pr"),
    ("--method.chunksize 3", "did you mean method.chunk_size?"),
    ("--trainin.steps 3", "did you mean training.steps?"),
    ("stray", "'stray': not a flag"),
    ("stray.yaml", "stray.yaml: not a flag; a file of keys is given as --config stray.yaml"),
    ("--training.steps", "--training.steps: needs a value"),
]
FILES_OF_KEYS = [
    ("--config", "--config: needs a value"),
    ("--config nowhere.yaml", "--config nowhere.yaml: no such file"),
    ("--config stepz.yaml", "stepz.yaml: unknown key training.stepz; did you mean training.steps?"),
    ("--config section.yaml", "section.yaml: unknown key trainingg; did you mean training? (--help-all"),
    ("--config null.yaml", "null.yaml: training.lr: expected a finite number above 0, got null"),
    ("--config steps.yaml", "steps.yaml: training.steps: expected a whole number (1 or more), got 'two'"),
    ("--config list.yaml", "list.yaml: training.lr: expected a finite number"),
    ("--config bare.yaml", "bare.yaml: training is a section"),
    ("--config sections.yaml", "sections.yaml: holds no sections"),
    ("--config empty.yaml", "empty.yaml: holds no sections"),
    ("--config not.yaml", "not.yaml: not valid YAML"),
    ("--config twice.yaml", "twice.yaml: not valid YAML: training is there twice"),
    ("--config flat.yaml", "did you mean data.seqlen?"),
]
VALUES = [
    ("--training.steps two", "--training.steps: expected a whole number (1 or more), got 'two'"),
    ("--training.steps 0", "--training.steps: expected a whole number (1 or more), got '0'"),
    ("--training.lr high", "--training.lr: expected a finite number above 0, got 'high'; its default"),
    ("--training.lr .inf", "--training.lr: expected a finite number above 0"),
    ("--training.min_lr 1", "training.min_lr: 1.0 is above"),
    (
        "--training.min_lr 0 --training.schedule constant",
        "training.min_lr: the schedule constant does not fall",
    ),
    ("--training.decay_steps 2", "training.decay_steps: is for wsd, not cosine"),
    ("--training.schedule wsd --training.decay_steps 7", "2 steps of warm-up and 7 of decay are more than"),
    ("--training.report_to tensorbord", "--training.report_to: expected none, or tensorboard"),
    ("--training.betas '[0.9, 1]'", "--training.betas: expected two numbers in [0, 1)"),
    ("--training.seed -1", "--training.seed: expected a whole number (0 or more)"),
    ("--training.deterministic maybe", "expected true or false or null"),
    ("--training.steps 1e5", "expected a whole number (1 or more), got '1e5'; write 100000 or 100K"),
    ("--data.seqlen 64KB", "got '64KB'; write 64K"),
    ("--training.precision fp16", "float16 would need loss scaling, which there is not: take bfloat16"),
    ("--model.mixer mamba_ssm", "did you mean mamba?"),
    ("--training.precision fp8", "one of auto, float32, bfloat16, float64"),
    ("--training.device nothing", "is no device"),
    ("--training.device meta", "meta asked for, but this PyTorch computes nothing on meta"),
    ("--training.optimizer adamw8bit --training.precision float64", "use adamw for"),
    ("--data.seqlen 1", "--data.seqlen: expected a whole number (2 or more)"),
    ("--data.eval_fraction nan", "--data.eval_fraction: expected a number from 0 to 0.5"),
    ("--data.weights '[1, 2]'", "data.weights: 2 weights for 1 entries of data.path"),
    ("--data.path '[text.txt, text.txt]' --data.weights '[1, 2]'", "text.txt is in two entries of data.path"),
    ("--data.weights '[0]'", "--data.weights: expected a list"),
    ("--data.weights '[1]' --training.carry_state previous", "data.weights: training.carry_state previous"),
    ("--data.validation_path nothing.txt", "data.validation_path nothing.txt: no such file or folder"),
    ("--data.validation_path text.txt", "text.txt is trained on too"),
    ("--data.tokenizer ''", "--data.tokenizer: expected a text that is not empty"),
    ("--data.path []", "--data.path: expected a path, a list of paths or null"),
    ("--data.documents packed --data.separator ''", "packed documents need a data.separator"),
    ("--model.d_model 0", "d_model"),
    ("--model.mixer nothing", "mixer"),
    ("--model.mixer mamba2 --model.headdim 7", "headdim"),
    ("--model.mixer nowhere:Mixer", "No module named 'nowhere'; name a class as module:Class"),
    ("--model.mixer torch.nn:Identity", "must be a torch module with initial_state"),
    ("--model.vocab_size 50", "out of range for model.vocab_size 50"),
    ("--method.name magic", "--method.name"),
    ("--method.chunk_size 0", "chunk_size"),
    ("--method.keep all", "edges"),
    ("--method.memory 18Q", "memory must be a size such as"),
    ("--method.checkpoints 0", "checkpoints must be a whole number of states per layer, 1 or more"),
    ("--method.checkpoints 8 --method.keep inputs", "leave keep out, or take offload=True"),
    ("--method.checkpoints 8 --cluster.shards 1 --cluster.sequence 2", "leave it out: each worker stores"),
    ("--method.name truncated --method.window 8 --model.mixer attention", "this stack has attention"),
    (
        "--method.name truncated --method.window 8 --method.unbiased true --method.chunk_size 9",
        "below window",
    ),
    ("--run.name a/b", "--run.name: expected a folder's name"),
    ("--run.dir short.txt", "is a file"),
    ("--run.dir caf\udce9", "its name is not UTF-8"),
    ("--run.resume step-00000003", "no such checkpoint"),
    ("--run.resume other/checkpoints/step-00000003", "damaged checkpoint"),
    ("--run.resume run", "run: is a run, not a checkpoint"),
    ("--run.dir run", "holds another run"),
    (f"--run.resume {STEP} --model.d_model 32", "model.d_model 16, this run has 32"),
    (f"--run.resume {STEP} --data.separator x", "put text and tokenizer back, or name other text"),
    (f"--run.resume {STEP} --training.optimizer muon", "training.optimizer adamw, this run has muon"),
    ("--training.carry_state other --model.mixer attention", "attention's keys and values would grow"),
    ("--training.carry_state previous --cluster.shards 1 --cluster.sequence 2", "leave out cluster.replicas"),
    ("--cluster.shards -1", "--cluster.shards: expected a whole number (0 or more) or auto"),
    ("--cluster.sequence 2", "cluster.sequence: 2 needs worker processes"),
    (
        "--cluster.tensor 2",
        "cluster.tensor: 2 needs worker processes; set --cluster.shards to 1 or more, or start them",
    ),
    ("--training.profile 2 --cluster.shards 1", "training.profile: records one process"),
    ("--training.save_async true --cluster.shards 1", "training.save_async: shards save between steps"),
]
TEXTS = [
    ("nothing.txt", "no such file or folder"),
    ("hollow", "no supported file"),
    ("folder", "there is no supported file in it; supported are .txt"),
    ("a.pdf", "unsupported kind of file"),
    ("*.pdf", "the pattern matches no supported file"),
    ("empty.txt", "no text"),
    ("longer.txt", "data.path: 58 tokens to train on, but data.seqlen 64 needs at least 65: lower"),
    ("latin.txt", "latin.txt: not UTF-8 (byte 5)"),
    ("cut.jsonl", "cut.jsonl:2: not a JSON line"),
    ("list.jsonl", "list.jsonl:3, element 1: is 1, not a JSON object; write"),
    ("body.jsonl", "body.jsonl:1: no field 'text'; there are 'body'"),
    ("number.jsonl", "number.jsonl:1: field 'text' is int"),
    ("half.jsonl", r"half of a surrogate pair (\ud800), which is no text"),
    (
        "half_chat.jsonl",
        "half_chat.jsonl:2: field 'messages', message 1, content has half of a surrogate pair (\\ud83d)",
    ),
    ("half_call.jsonl", "message 1, tool_calls, element 1, arguments, city has half of a surrogate pair"),
    ("chat.jsonl", "data.tokenizer byte: has no chat template"),
    (
        "roles.jsonl",
        "roles.jsonl:1: field 'messages' is a list of strings, not text; write one string, or a record",
    ),
    ("latin.jsonl", "latin.jsonl:1: not a JSON line in UTF-8"),
    ("digits.jsonl", "digits.jsonl:2: not a JSON line"),
    ("not.txt.gz", "not.txt.gz: damaged gzip"),
    ("cut.txt.gz", "cut.txt.gz: damaged gzip"),
    ("not.txt.zst", "not.txt.zst: damaged zstd"),
    ("cut.txt.zst", "cut.txt.zst: damaged zstd"),
    ("not.parquet", "not.parquet: damaged parquet"),
    ("pipe.txt", "pipe.txt: a pipe, socket or device"),
    ("device.txt", "device.txt: a pipe, socket or device"),
]
TOKENIZERS = [
    ("nowhere.json", "no such file or folder"),
    ("object.json", "not a tokenizer.json"),
    ("not.json", "not a tokenizer.json"),
    ("binary.json", "not a tokenizer.json"),
]
SWEEPS = [
    ("--windows 0", "--windows: window must be a whole number of tokens, 1 or more, full or auto; got 0"),
    ("--windows=-1", "--windows: window must be"),
    ("--windows 1.5", "--windows: '1.5' is not a whole number"),
    ("--windows ,", "--windows: is empty"),
    ("--windows 4,auto --methods layer-local", "--windows auto: is for truncated; add one to --methods"),
    ("--windows 4 --methods exact", "--windows 4: is for truncated, layer-local; add one"),
    ("--tolerance nan", "--tolerance: tolerance must be a number between 0 and 1"),
    ("--methods truncatd", "--methods: expected one of backprop"),
    ("--seqlen many", "seqlen: expected a whole number (2 or more), got 'many'"),
    ("--seqlen 1M", "needs at least 1048577"),
    ("--batches 0", "--batches: expected a whole number (1 or more)"),
    ("--baseline truncated", "--baseline: expected one of auto, backprop, exact"),
    ("--model nowhere", "--model nowhere: no such run or checkpoint; runs here: mine"),
    ("--model run --model.d_model 8", "leave one of them out"),
    ("--model.vocab_size 50", "out of range"),
    ("--model.mixer attention --windows 8 --data random", "this stack has attention"),
    ("--window 4", "--window: adjoint sweep has no such flag; did you mean --windows?"),
    ("--method.window 4", "use --methods"),
    ("--training.seed 4", "use --seed"),
    ("--out short.txt", "is a file"),
]
OTHERS = [
    ("trian", "did you mean train?"),
    ("doctor --jsn", "--jsn: adjoint doctor has no such flag; did you mean --json?"),
    ("doctor stray", "stray: no such model name, class, model_type or folder"),
    ("doctor Jamba stray", "'stray': adjoint doctor has no such argument"),
    ("doctor Nemotrn", "did you mean Nemotron-H"),
    ("doctor .", "has no config.json"),
    ("cluster", "the following arguments are required: COMMAND"),
    ("cluster emv", "COMMAND: invalid choice: 'emv' (choose from "),
    ("cluster env --jsn", "--jsn: adjoint cluster has no such flag; "),
    ("eval run --lenght 4", "--lenght: adjoint eval has no such flag; did you mean --lengths?"),
    (
        "eval adapter",
        "holds an adapter of PEFT, for some/base, and no model; of a run of adjoint train",
    ),
    ("train --model.from_pretrained adapter", "untie these before), or name some/base"),
    ("train --model.trust_remote_code true", "model.trust_remote_code: is for a pretrained model"),
    ("plan stray", "'stray': not a flag"),
    ("plan --device-memry 4", "--device-memry: adjoint plan has no such flag; did you mean --device-memory?"),
    ("eval run --lengths 1G", "a longer text"),
    ("eval run --lengths some", "--lengths: expected a whole number (2 or more), got 'some'"),
    ("eval run --lengths 40 --needles --path text.txt", "use 92 or more"),
    ("eval run --device abacus", "--device: 'abacus' is no device"),
    ("eval run --device cuda:9", "--device: cuda:9 asked for, but PyTorch sees"),
    ("eval nowhere", "nowhere: no such run or checkpoint; runs here: mine"),
    ("export run --to folder", "is not empty"),
    ("export run --to short.txt", "is a file"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, and what cannot be trained on."""
    folder = tmp_path_factory.mktemp("refused")
    assert train_tiny(folder, training__steps=1, training__sample_tokens=0) == 0
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in ("hollow", "runs/mine"):
        (folder / name).mkdir(parents=True)
    (folder / "device.txt").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.txt")
    return folder


Refused = Callable[[list[str]], str]


@pytest.fixture
def refused(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line that a command ends with; nothing is left behind, but where a model and a method meet."""
    monkeypatch.chdir(place)

    def line_of(argv: list[str]) -> str:
        before = sorted(place.iterdir())
        assert run(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        if "this stack has attention" in error:
            shutil.rmtree(place / "new", ignore_errors=True)
        assert sorted(place.iterdir()) == before
        assert not list((place / "cache").glob("*.tmp-*"))
        return error

    return line_of


def train(words: str) -> list[str]:
    """A run in the current folder with more flags."""
    return [*tiny(Path(), run__dir="new"), *shlex.split(words)]


@pytest.mark.parametrize(
    "words, said",
    [
        *KEYS,
        *FILES_OF_KEYS,
        *VALUES,
        *((f"--data.path '{path}'", said) for path, said in TEXTS),
        *((f"--data.tokenizer {path}", said) for path, said in TOKENIZERS),
    ],
)
def test_train(words: str, said: str, refused: Refused) -> None:
    for package, kind in (("pyarrow", ".parquet"), ("pyarrow", ".zst'"), ("tokenizers", ".json")):
        if words.endswith(kind):
            pytest.importorskip(package)
    assert said in refused(train(words))


@pytest.mark.parametrize("words, said", SWEEPS)
def test_sweep(words: str, said: str, refused: Refused) -> None:
    small = "sweep --out new --batches 1 --windows 1 --seqlen 32 --data.path text.txt --data.cache_dir cache"
    small += " --model.d_model 8" * ("--model " not in words)
    assert said in refused(shlex.split(f"{small} {words}"))


@pytest.mark.parametrize("line, said", OTHERS)
def test_other_commands(line: str, said: str, refused: Refused) -> None:
    assert said in refused(line.split())


def test_arguments_that_a_method_does_not_take_or_needs(refused: Refused) -> None:
    """The methods that take it are named; what has no default is asked for."""
    fields = {name: dataclasses.fields(cls) for name, cls in METHODS.items()}
    takers = [name for name in METHODS if "chunk_size" in {field.name for field in fields[name]}]
    chosen = train("--method.name backprop --method.chunk_size 4096")
    assert f"taken by: {', '.join(takers)}" in refused(chosen)
    needed = [(name, f.name) for name, own in fields.items() for f in own if f.default is dataclasses.MISSING]
    assert needed
    for name, key in needed:
        assert f"method.{key}" in refused(train(f"--method.name {name}"))


@pytest.mark.parametrize(
    "package, words",
    [
        ("torchao.optim", "--training.optimizer adamw8bit"),
        ("tokenizers", "--data.tokenizer object.json"),
        ("pyarrow", "--data.path not.parquet"),
        ("tensorboard", "--training.report_to tensorboard"),
        ("wandb", "--training.report_to tensorboard,wandb"),
    ],
)
def test_missing_packages(
    package: str, words: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"torch.utils.{package}", raising=False)  # PyTorch's, which imports it
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package.partition('.')[0]}" in refused(train(words))
