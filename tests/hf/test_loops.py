"""`adjoint.wrap` in other people's training loops: transformers' Trainer, TRL, PEFT, accelerate, DDP, and
the examples. Each is compared with the same loop around the untouched model."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint import integrations
from adjoint.errors import UserError
from adjoint.hf import hf_model
from adjoint.hf.verify import first_use
from tests.hf.hf_models import VOCAB, assert_exact, errors, float64_throughout, loss_and_gradients, make
from tests.model_helpers import current_gradients, make_ids

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
TRAINING: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 1}
TRAINING |= {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 3}
METHOD = adjoint.Exact(chunk_size=16)
BAMBA = "BambaForCausalLM"  # Mamba-2, then attention


def tiny(name: str = BAMBA, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    return make(name, dtype, seed, num_hidden_layers=2)


def is_wrapped(model: Any) -> bool:
    """Whether a model makes no logits by itself if labels are given."""
    ids = make_ids(1, 20, vocab_size=VOCAB)
    with torch.no_grad():
        return "logits" not in model(input_ids=ids, labels=ids).keys()  # noqa: SIM118


def batch(rows: int = 2) -> dict[str, Tensor]:
    ids = make_ids(rows, 37, vocab_size=VOCAB)
    return {"input_ids": ids, "labels": ids}


def documents(count: int) -> list[list[int]]:
    """Return documents of 12 to 32 tokens, each with its own stride through the vocabulary, to be learnt."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(12, 33, (count,), generator=draw).tolist()
    strides = torch.randint(1, 5, (count,), generator=draw).tolist()
    return [
        [3 + (7 * i + stride * t) % (VOCAB - 3) for t in range(length)]
        for i, (length, stride) in enumerate(zip(lengths, strides, strict=True))
    ]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of ragged rows, padded at the right."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def logged(trainer: Any, key: str) -> Tensor:
    entries = [entry[key] for entry in trainer.state.log_history if key in entry]
    return torch.tensor(entries, dtype=torch.float64)


# ------------------------------------------------------------------------------------ transformers' Trainer


def with_trainer(model: Any, folder: Path, resume: Path | None = None) -> Any:
    """Return the Trainer after `STEPS` steps of ragged batches."""
    arguments = transformers.TrainingArguments(
        str(folder),
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_steps=STEPS // 2,
        **TRAINING | {"learning_rate": 4e-3},
    )
    rows = [{"input_ids": ids} for ids in documents(72)]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows[8:], eval_dataset=rows[:8], data_collator=padded
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Train an untouched and a wrapped model; return the trainers and the folder of the latter's
    checkpoints."""
    folder = tmp_path_factory.mktemp("trainer")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain = with_trainer(tiny(), folder / "plain")
    wrapped = with_trainer(adjoint.wrap(tiny(), METHOD), folder / "wrapped")
    torch.set_num_threads(threads)
    return plain, wrapped, folder / "wrapped"


@pytest.mark.xdist_group("trained")  # by one process, once
def test_trainer_with_accumulation_clipping_and_evaluation(trained: tuple[Any, Any, Path]) -> None:
    plain, wrapped, _ = trained
    assert is_wrapped(wrapped.model) and not is_wrapped(plain.model)
    losses, expected = logged(wrapped, "loss"), logged(plain, "loss")
    assert len(expected) == STEPS and expected[-5:].mean() < expected[:5].mean() - 0.5  # it learns
    assert (losses - expected).abs().max() <= 1e-5
    evaluated = logged(plain, "eval_loss")
    assert len(evaluated) == 2 and (logged(wrapped, "eval_loss") - evaluated).abs().max() <= 1e-5
    norms = logged(plain, "grad_norm")
    assert norms.min() > 0.5  # all are clipped
    assert ((logged(wrapped, "grad_norm") - norms) / norms).abs().max() <= 1e-4


@pytest.mark.xdist_group("trained")
def test_trainer_resumes_bitwise(trained: tuple[Any, Any, Path], tmp_path: Path) -> None:
    _, wrapped, folder = trained
    model = adjoint.wrap(tiny(seed=1), METHOD)  # other weights: all must come from the checkpoint
    resumed = with_trainer(model, tmp_path, resume=folder / f"checkpoint-{STEPS // 2}")
    assert torch.equal(logged(resumed, "loss"), logged(wrapped, "loss"))
    ends = wrapped.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, ends[name]), name


def own_loss(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = output["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def accuracy(evaluation: Any) -> dict[str, float]:
    right, counted = (
        evaluation.predictions[:, :-1].argmax(-1) == evaluation.label_ids[:, 1:],
        evaluation.label_ids[:, 1:] != -100,
    )
    return {"accuracy": (right & counted).sum() / counted.sum(), "logits": evaluation.predictions.size}


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("arguments", "options"),
    [({}, {}), ({"label_smoothing_factor": 0.2}, {}), ({}, {"compute_loss_func": own_loss})],
)
def test_trainer_with_metrics_and_other_losses(
    arguments: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for model in (tiny(), adjoint.wrap(tiny(), METHOD)):
        rows = [{"input_ids": ids} for ids in documents(16)]
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(str(tmp_path), **{**TRAINING, "max_steps": 3}, **arguments),
            train_dataset=rows[8:],
            eval_dataset=rows[:8],
            data_collator=padded,
            compute_metrics=accuracy,
            **options,
        )
        trainer.train()
        evaluated = trainer.evaluate()
        names = ("eval_loss", "eval_accuracy", "eval_logits")
        results.append(torch.cat([logged(trainer, "loss"), torch.tensor([evaluated[n] for n in names])]))
    assert torch.allclose(*results, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------ TRL's trainers, ten steps of each

FEW = TRAINING | {"max_steps": 10, "bf16": False, "save_strategy": "no"}
TURNS = """{% for m in messages %}{% if m["role"] == "assistant" %}{% generation %}{{ m["content"] }} <eos> \
{% endgeneration %}{% else %}{{ m["content"] }} {% endif %}{% endfor %}"""
GRPO = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 24, "beta": 0.1}


def tokenizer() -> Any:
    """Return a tokenizer whose words are numbers, each its own token."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<pad>", "<bos>", "<eos>", *(str(i) for i in range(3, VOCAB))]
    by_word = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, "<pad>"))
    by_word.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer_of_numbers = transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_word, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer_of_numbers.chat_template = TURNS
    return tokenizer_of_numbers


def words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word) % 7 for word in text.split() if word.isdigit()) / 10 for text in completions]


def turns(d: list[int]) -> list[dict[str, str]]:
    return [{"role": "user", "content": words(d[:5])}, {"role": "assistant", "content": words(d[5:])}]


Columns = dict[str, Callable[[list[int]], Any]]
PREFERENCES: Columns = {
    "prompt": lambda d: words(d[:6]),
    "chosen": lambda d: " " + words(d[6:]),
    "rejected": lambda d: " " + words(d[:2:-1]),
}
REWARDS: Columns = {"chosen": words, "rejected": lambda d: words(d[::-1])}
RATINGS: Columns = {
    "prompt": lambda d: words(d[:6]),
    "completion": lambda d: " " + words(d[6:]),
    "label": lambda d: d[0] % 2 == 0,
}
PACKED = {"packing": True, "max_length": 64, "assistant_only_loss": True}
TRLCase = tuple[str, str, Columns, dict[str, Any]]
# Trainer, class of the model, columns of a row made of each document, and options.
TRL: dict[str, TRLCase] = {
    "padded": ("SFT", BAMBA, {"input_ids": list}, {"max_length": None}),
    # untouched, a recurrent model does not keep packed documents apart: its rows are padded
    "documents end to end": ("SFT", BAMBA, {"input_ids": list}, {"max_length": None, "padding_free": True}),
    "packed, answers only": ("SFT", "LlamaForCausalLM", {"messages": turns}, PACKED),
    "DPO": ("DPO", BAMBA, PREFERENCES, {"max_length": 64}),
    "reward model": ("Reward", "LlamaForSequenceClassification", REWARDS, {"max_length": 64}),
    # sampled by the model itself, with a reference model (beta)
    "GRPO": ("GRPO", BAMBA, {"prompt": lambda d: words(d[:6])}, GRPO),
    # the trainers' own defaults: adapters, gradient checkpointing, a column that the model ignores
    "SFT with LoRA": ("SFT", BAMBA, {"messages": turns}, {"peft_config": {"task_type": "CAUSAL_LM"}}),
    "DPO with LoRA": ("DPO", BAMBA, PREFERENCES, {"peft_config": {"task_type": "CAUSAL_LM"}}),
    "reward model with LoRA and margins": (
        "Reward",
        "LlamaForSequenceClassification",
        REWARDS | {"margin": lambda d: len(d) / 100},
        {"peft_config": {"task_type": "SEQ_CLS"}},
    ),
    "KTO": ("KTO", BAMBA, RATINGS, {"per_device_train_batch_size": 4}),
}
SLOW = {"GRPO", "KTO"}
TRAINERS_LORA = {"init_lora_weights": True}  # their default: an adapter that begins as no change


def trl_model(case: TRLCase, folder: Path) -> None:
    """Save the case's model, with weights drawn from a seed, into folder/model."""
    config = tiny(case[1].replace("SequenceClassification", "CausalLM")).config
    config.num_labels = 1
    torch.manual_seed(0)
    getattr(transformers, case[1])(config).save_pretrained(folder / "model")


def trl_trainer(case: TRLCase, folder: Path, wrapped: bool, **more: Any) -> Any:
    """Return a TRL trainer of folder/model, wrapped or not.

    Args:
        more: options besides the case's.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    trainer_class, model_class, columns, options = case
    model = getattr(transformers, model_class).from_pretrained(folder / "model", dtype=torch.float32).train()
    settings = FEW | options | more
    adapter, callbacks = settings.pop("peft_config", None), settings.pop("callbacks", None)
    torch.manual_seed(0)  # an adapter's weights are drawn by the trainer
    rows = {column: [make_column(d) for d in documents(24)] for column, make_column in columns.items()}
    objects: dict[str, Any] = {"reward_funcs": reward} if trainer_class in ("GRPO", "RLOO") else {}
    if adapter is not None:
        objects["peft_config"] = lora(**TRAINERS_LORA, **adapter)(pytest.importorskip("peft"))
    if not hasattr(trl, f"{trainer_class}Trainer"):
        trl = pytest.importorskip(f"trl.experimental.{trainer_class.lower()}")
    return getattr(trl, f"{trainer_class}Trainer")(
        adjoint.wrap(model, METHOD) if wrapped else model,
        args=getattr(trl, f"{trainer_class}Config")(str(folder), **settings),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **objects,
    )


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in TRL]
)
def test_trl(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a wrapped model runs by chunks, and nothing that a trainer does between steps makes it
    look like another model."""
    trl_model(TRL[case], tmp_path)
    losses, calls = [], []
    make_step = hf_model.make_step
    monkeypatch.setattr(hf_model, "make_step", lambda *arguments: calls.append(1) or make_step(*arguments))
    compares, compare = [], first_use.compare
    monkeypatch.setattr(first_use, "compare", lambda *arguments: compares.append(1) or compare(*arguments))
    padding_free = "padding_free" in TRL[case][3]
    for wrapped in (False, True):
        trainer = trl_trainer(
            TRL[case], tmp_path, wrapped, **({"padding_free": wrapped} if padding_free else {})
        )
        assert not calls and (not padding_free or trainer.padding_free == wrapped)
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert len(losses[0]) == 10 and len(calls) in (10, 20)  # 20 with a reference that is the model itself
    assert len(compares) <= 2  # for batches with padding and without
    assert losses[0].std() > 1e-4 and (losses[1] - losses[0]).abs().max() <= 1e-5


def test_trainers_one_after_another(tmp_path: Path) -> None:
    """TRL leaves a forward on the model, which is then wrapped again, and in the end unwrapped."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    results = []
    for wrapped in (False, True):
        model, losses = tiny(), []
        for chunk_size in (16, 8):
            trainer = trl.SFTTrainer(
                model,
                args=trl.SFTConfig(str(tmp_path), **FEW | {"max_steps": 2, "max_length": None}),
                train_dataset=datasets.Dataset.from_dict({"input_ids": documents(8)}),
                processing_class=tokenizer(),
                callbacks=[integrations.AdjointCallback(adjoint.Exact(chunk_size))] if wrapped else [],
            )
            trainer.train()
            losses.append(logged(trainer, "loss"))
        assert is_wrapped(model) == wrapped
        adjoint.unwrap(model)
        assert not is_wrapped(model)
        results.append(torch.cat([*losses, model(**batch()).loss.detach().double()[None]]))
    assert len(results[0]) == 5 and torch.allclose(*results, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ PEFT


def lora(**options: Any) -> Callable[[Any], Any]:
    options_with_defaults = {
        "r": 3,
        "target_modules": ["in_proj", "q_proj"],
        "init_lora_weights": False,
        **options,
    }
    return lambda peft: peft.LoraConfig(**options_with_defaults)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lora(),
    "LoRA of the head": lora(target_modules=["in_proj", "lm_head"]),
    "DoRA": lora(use_dora=True),
    "modules_to_save": lora(target_modules=["in_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "prompt tuning": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=5),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("case", ADAPTERS)
def test_ten_steps_of_peft(case: str, wrapped_first: bool) -> None:
    peft, steps = pytest.importorskip("peft"), []
    with float64_throughout():
        for wrapped in (True, False):
            model = tiny(dtype=torch.float64)
            model = adjoint.wrap(model, METHOD) if wrapped and wrapped_first else model
            torch.manual_seed(1)
            config = ADAPTERS[case](peft)
            config.task_type = "CAUSAL_LM"
            model = peft.get_peft_model(model, config)
            model = adjoint.wrap(model, METHOD) if wrapped and not wrapped_first else model
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
            steps.append([])
            for _ in range(10):
                steps[-1].append(loss_and_gradients(model, **batch()))
                optimizer.step()
            assert is_wrapped(model) == wrapped
    ours, plain = steps
    assert_exact(ours[0], plain[0])
    assert all(g.norm() > 0 for g in plain[0][1].values()) and plain[-1][0] < plain[0][0]
    assert all(abs(a - b) <= 1e-9 for (a, _), (b, _) in zip(ours, plain, strict=True))


def test_an_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny("Mamba2ForCausalLM").save_pretrained(tmp_path / "base")

    def base() -> Any:
        return transformers.Mamba2ForCausalLM.from_pretrained(tmp_path / "base").train()

    config = peft.LoraConfig(
        r=3, target_modules=["in_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(adjoint.wrap(base(), METHOD), config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    first, _ = loss_and_gradients(model, **batch())
    optimizer.step()
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True)
    assert not is_wrapped(loaded)
    expected, got = (loss_and_gradients(m, **batch()) for m in (model, adjoint.wrap(loaded, METHOD)))
    assert expected[0] < first
    assert_same_bits(got, expected)


def assert_same_bits(got: Any, expected: Any) -> None:
    """Assert that two results of `loss_and_gradients` are bitwise equal."""
    assert torch.equal(got[0], expected[0]) and got[1].keys() == expected[1].keys()
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])


# ---------------------------------------------------------------------------------------------- accelerate


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_in_bfloat16() -> None:
    """A wrapped model is as far from float32 as the untouched one under the same autocast."""
    from accelerate import Accelerator

    ids = make_ids(2, 70, vocab_size=VOCAB)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    single = loss_and_gradients(tiny(), input_ids=ids, labels=ids)
    distances = []
    for wrapped in (False, True):
        model = tiny()
        prepared, optimizer = accelerator.prepare(
            adjoint.wrap(model, METHOD) if wrapped else model, torch.optim.AdamW(model.parameters())
        )
        loss = prepared(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        distances.append(errors((loss.detach(), current_gradients(model)), single).total)
        assert abs(loss.item() - single[0]) < 0.01
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert accelerator.unwrap_model(prepared) is model and is_wrapped(model) == wrapped
    plain, ours = distances
    assert 1e-4 < plain < 0.1, "the untouched model is not in bfloat16"
    assert ours <= 1.5 * plain


# ------------------------------------------------------------------------- the model stays what it is


def through_torch_save(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save])
def test_copies_are_wrapped_and_have_their_own_weights(copied: Callable[[Any], Any]) -> None:
    """Copies are wrapped, and the verification of a model is not its copy's."""
    model = adjoint.wrap(tiny(), METHOD)
    expected = loss_and_gradients(model, **batch())
    model_copy = copied(model)
    assert type(model_copy) is type(model) and is_wrapped(model_copy)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same_bits(loss_and_gradients(model_copy, **batch()), expected)
    model_copy.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="is not that of the whole"):
        model_copy(**batch())


def replica_of(model: torch.nn.Module) -> Any:
    """Return a replica as `nn.DataParallel` calls it on each GPU: its modules share values and nothing
    else."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, None if child is None else replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.clone())
    return replicas[model]


@pytest.mark.parametrize("method", [adjoint.Exact(8), adjoint.MiniSequence()])
def test_replicas_of_data_parallel_are_refused(method: Any) -> None:
    """The Trainer makes replicas where several GPUs are visible to one process."""
    model, inputs = adjoint.wrap(tiny(), method), batch()
    hidden = replica_of(model).model
    for call in (lambda: replica_of(model)(**inputs), lambda: hidden.train()(inputs["input_ids"])):
        with pytest.raises(UserError, match=r"DataParallel.*torchrun"):
            call()
    stack = adjoint.Stack(adjoint.StackConfig(vocab_size=64, d_model=16, n_layer=1))
    with pytest.raises(UserError, match=r"DataParallel.*torchrun"):
        replica_of(stack)(inputs["input_ids"], labels=inputs["input_ids"], method=adjoint.Exact(8))


@pytest.mark.parametrize("name", [BAMBA, "MambaForCausalLM", "Mamba2ForCausalLM"])
def test_what_wrapping_leaves_alone(name: str, tmp_path: Path) -> None:
    plain, model, ids = tiny(name), adjoint.wrap(tiny(name), METHOD), batch()["input_ids"]
    loss_and_gradients(model, **batch())
    properties = []
    for each, folder in ((plain, tmp_path / "plain"), (model, tmp_path / "wrapped")):
        each.save_pretrained(folder)
        names = [n for n, _ in each.named_parameters()]
        files = {f.name for f in folder.iterdir()}
        written = each.eval().generate(ids[:, :5], max_new_tokens=8, do_sample=False).tolist()
        properties.append(
            (list(each.state_dict()), names, files, (folder / "config.json").read_text(), written)
        )
    assert properties[0] == properties[1]
    adjoint.unwrap(model)
    assert type(model) is type(plain) and type(model.base_model) is type(plain.base_model)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert not is_wrapped(model)


# ------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        pytest.param("own_loop", None, marks=pytest.mark.slow),
        pytest.param("transformers_trainer", "accelerate", marks=pytest.mark.slow),
        pytest.param("accelerate_loop", "accelerate", marks=pytest.mark.slow),
        pytest.param("ddp", None, marks=pytest.mark.slow),
        pytest.param("fsdp", None, marks=pytest.mark.slow),
        pytest.param("sequence", None, marks=pytest.mark.slow),
        ("lstm", None),
        pytest.param("peft_lora", "peft", marks=pytest.mark.slow),
        pytest.param("trl_sft", "trl", marks=pytest.mark.slow),
    ],
)
def test_examples(names: str, needs: str | None, tmp_path: Path) -> None:
    """The examples run from anywhere without a network, and leave nothing behind."""
    if needs is not None:
        pytest.importorskip(needs)
    files = [str(ROOT / "examples" / f"{name}.py") for name in names.split()]
    run = ["-c", f"import runpy; [runpy.run_path(file, run_name='__main__') for file in {files}]"]
    if names in ("fsdp", "sequence"):
        run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *files]
    done = subprocess.run(
        [sys.executable, *run, "--steps", "2", "--seqlen", "512"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    assert list(tmp_path.iterdir()) == []
