"""accelerate's `cp_size` as a `sequence_group`: trainers' runs on several ranks beside one process's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, not in each rank
import torch.distributed as dist

import adjoint
from adjoint.errors import UserError
from tests.hf.hf_models import make
from tests.hf.test_loops import TRL, logged, trl_model, trl_trainer
from tests.integrations import shared_sequences
from tests.integrations.shared_sequences import CLIP, METHOD, Case
from tests.model_helpers import make_ids
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("transformers.trainer")
pytestmark = pytest.mark.usefixtures("one_thread", "fresh_accelerate")

KINDS = ("trainer", "sft", "accelerator")
MODELS = ("LlamaForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM")
# How each layout is asked for: accelerate's own configuration needs FSDP2.
HELD: dict[str, dict[str, Any]] = {
    "cp2": {"uses_our_config": True, "on_cpu": True},
    "cp2-shard2": {"fsdp": True},
    "cp2-replicate2": {"uses_our_config": True, "wraps_first": True},
}
SAVING = (("save_strategy", "steps"), ("save_steps", 2))
LORA_CLIP = (("max_grad_norm", 0.14),)
ON_ONE = ("kind", "model", "lora", "dtype", "iterable", "options")
LOGGED_RTOL = 2e-7  # transformers logs losses in float32

RunCase = Callable[..., dict[str, Any]]


def skip_without_fused_head() -> None:
    """Skip a test where TRL is not there or older: its trainers then read hidden states."""
    if not hasattr(pytest.importorskip("trl.trainer.utils"), "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")


def in_a_process(function: Callable[..., None], *args: object) -> None:
    """Call a function in a process of its own, which accelerate's state does not outlive."""
    process = torch.multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """Return a function that runs a case in processes of its own, once, and returns its results."""
    folder, names = tmp_path_factory.mktemp("cases"), dict[Case, str]()

    def run(case: Case, output: str | None = None) -> dict[str, Any]:
        name = names.get(case) or output or f"case{len(names)}"
        if case not in names:
            if case.kind == "sft":
                skip_without_fused_head()
            if case.processes == 1:
                in_a_process(shared_sequences.run, case, str(folder), name)
            else:
                on_ranks(case.processes, folder, shared_sequences.run, case, str(folder), name, timeout=120)
            names[case] = name
        result: dict[str, Any] = torch.load(folder / f"{name}.pt")
        return result | {"output": folder / f"{name}.output"}

    return run


def on_one_process(case: Case) -> Case:
    """Return the same run of one process."""
    return Case(**{name: getattr(case, name) for name in ON_ONE})


def assert_same(
    result: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10, clip: float = CLIP
) -> None:
    """Assert that two runs of three steps, clipped at a norm of gradients, are the same."""
    assert len(expected["losses"]) == len(expected["norms"]) == 3
    assert min(expected["norms"]) > 1e-3 and max(expected["norms"]) > clip
    for name, values in expected.items():
        if name in ("weights", "output"):
            continue
        rtol = max(LOGGED_RTOL, tolerance) if name == "losses" else tolerance
        assert result[name] == pytest.approx(values, rel=rtol), name
    for name, weight in expected["weights"].items():
        assert (result["weights"][name] - weight).abs().max() <= tolerance * max(1, weight.abs().max()), name


# With the Trainer's checkpoint below, each kind, model and layout once.
QUICK_RUNS = ("sft", MODELS[1], "cp2-shard2"), ("accelerator", MODELS[2], "cp2-replicate2")


@pytest.mark.parametrize(
    ("kind", "model", "layout"),
    [
        pytest.param(*run, marks=() if run in QUICK_RUNS else pytest.mark.slow)
        for run in itertools.product(KINDS, MODELS, HELD)
    ],
)
def test_runs_are_those_of_one_process(kind: str, model: str, layout: str, results: RunCase) -> None:
    case = Case(kind, model, layout, **HELD[layout])
    assert_same(results(case), results(on_one_process(case)))


OTHER_CASES = {
    "cp without a data dimension of FSDP2": Case(layout="cp2", fsdp=True),
    "wrapped before accelerate's own configuration": Case(layout="cp2-shard2", fsdp=True, wraps_first=True),
    "accelerate's own configuration without FSDP2": Case(layout="cp2", on_cpu=True),
    "sizes of the environment": Case(layout="cp2-replicate2", from_environment=True),
    "sizes of the environment under FSDP2": Case(layout="cp2-shard2", fsdp=True, from_environment=True),
    "packed documents": Case("sft", MODELS[1], "cp2-shard2", fsdp=True, options=(("packing", True),)),
    "packed documents, wrapped first": Case(
        "sft", MODELS[0], "cp2-shard2", fsdp=True, wraps_first=True, options=(("packing", True),)
    ),
    "a loss that weighs tokens": Case(
        "sft", MODELS[0], "cp2-shard2", fsdp=True, options=(("loss_type", "dft"), ("max_grad_norm", 0.007))
    ),
    "TRL under FSDP2 alone": Case("sft", MODELS[1], "shard2", fsdp=True),
    "LoRA": Case("trainer", MODELS[0], "cp2-replicate2", lora=True, uses_our_config=True, options=LORA_CLIP),
    "LoRA under FSDP2": Case("sft", MODELS[0], "cp2-shard2", lora=True, fsdp=True, options=LORA_CLIP),
    "an IterableDataset": Case(layout="cp2-replicate2", uses_our_config=True, iterable=True),
    "an IterableDataset for one data rank": Case(layout="cp2", uses_our_config=True, iterable=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_CASES)
def test_other_runs_are_those_of_one_process(name: str, results: RunCase) -> None:
    case = OTHER_CASES[name]
    clip = dict(case.options).get("max_grad_norm", CLIP)
    assert_same(results(case), results(on_one_process(case)), clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize("layout", HELD)
def test_bf16_is_as_near_as_in_one_process(layout: str, results: RunCase) -> None:
    """Both in autocast, beside float32."""
    case = Case(layout=layout, dtype=torch.float32, **HELD[layout])
    in_bf16 = dataclasses.replace(case, options=(("bf16", True),))
    expected = results(on_one_process(case))
    distances = []
    for run in (on_one_process(in_bf16), in_bf16):
        result = results(run)
        distances.append(max(abs(a - b) / b for a, b in zip(result["norms"], expected["norms"], strict=True)))
    assert 1e-5 < distances[0] < 0.1, "one process is not in bfloat16"
    assert distances[1] <= 2 * distances[0]


SAVED = {
    f"{kind}, {layout}": Case(kind, layout=layout, options=SAVING, **HELD[layout])
    for kind in ("trainer", "sft")
    for layout in HELD
} | {"cp2 under FSDP2": Case(layout="cp2", fsdp=True, options=SAVING)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_changes_nothing_and_a_resumed_run_is_the_same(name: str, results: RunCase) -> None:
    """Saving sets the configuration's dtype and architectures, on rank 0 alone."""
    case = SAVED[name]
    saved = results(case)
    assert_same(saved, results(on_one_process(dataclasses.replace(case, options=()))))
    checkpoint = saved["output"] / "checkpoint-2"
    resumed = results(dataclasses.replace(case, resume=str(checkpoint), options=()))
    assert resumed["losses"] == saved["losses"] and resumed["norms"] == saved["norms"]
    for weight_name, weight in saved["weights"].items():
        assert torch.equal(resumed["weights"][weight_name], weight), weight_name
    shutil.rmtree(saved["output"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "layout"), [*itertools.product(("trainer", "sft"), ("cp2-replicate2", "cp2-shard2"))]
)
def test_evaluation_counts_each_row_once(kind: str, layout: str, results: RunCase) -> None:
    """Nine rows, two for each of two data ranks: the last batch has one, as without `cp_size`."""
    case = Case(kind, layout=layout, evaluates=True, **HELD[layout])
    expected = results(Case(kind, layout="replicate2", evaluates=True))
    result = results(case)
    assert result["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-12)
    assert_same(result, expected)


def run_page(code: str, folder: str, name: str) -> None:
    """Run the page's code in a folder, and save the trained weights."""
    if dist.is_initialized():
        shared_sequences.rank_environment()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, namespace)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(namespace["model"].state_dict(), f"{name}.pt")


def test_the_page(tmp_path: Path) -> None:
    """Run the ten lines of the page: they end with the weights of one process."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    (code,) = re.findall(r"^```python\n(# train.py\n.*?)^```", page, re.S | re.M)
    assert len(code.splitlines()) <= 15
    code = code.replace("4096", "16")
    make("BambaForCausalLM", torch.float32).save_pretrained(tmp_path / "model")
    torch.save(make_ids(2, 70, vocab_size=61), tmp_path / "ids.pt")
    on_ranks(2, tmp_path, run_page, code, str(tmp_path), "shared")
    alone = code.replace(", parallelism_config=SequenceGroupConfig(cp_size=2)", "")
    assert alone != code
    in_a_process(run_page, alone, str(tmp_path), "alone")
    shared, expected = (torch.load(tmp_path / f"{name}.pt") for name in ("shared", "alone"))
    first = make("BambaForCausalLM", torch.float32).state_dict()
    for name, weight in expected.items():
        assert (shared[name] - weight).abs().max() <= 1e-5, name
    assert any((first[name] - weight).abs().max() > 1e-4 for name, weight in expected.items())


# ------------------------------------------------------------------------------------------------- refusals


def refused(words: str, function: Callable[[], object]) -> None:
    from accelerate.state import AcceleratorState

    try:
        with pytest.raises(UserError, match=words) as raised:
            function()
        assert "\n" not in str(raised.value)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def check_refusals(folder: str) -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    from adjoint.integrations import AdjointCallback
    from adjoint.integrations.accelerate import SequenceGroupConfig

    shared_sequences.rank_environment()
    model = make("LlamaForCausalLM", torch.float32)
    rows = shared_sequences.documents(8)

    def prepare(wrapped: Any, **options: Any) -> Any:
        options.setdefault("parallelism_config", SequenceGroupConfig(cp_size=2))
        accelerator = Accelerator(cpu=True, **options)
        if not isinstance(wrapped, torch.nn.Module):  # wraps it now
            wrapped = wrapped()
        return accelerator.prepare(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))

    refused("LlamaForCausalLM is not wrapped", lambda: prepare(model))
    refused("backprop has no chunks", lambda: prepare(adjoint.wrap(model, adjoint.Backprop())))
    refused("backprop has no chunks", lambda: prepare(lambda: adjoint.wrap(model, adjoint.Backprop())))
    adjoint.hf.wrap.unwrap(model)
    for sizes in ({"sp_size": 2}, {"sp_size": 2, "cp_size": 2}, {"tp_size": 2, "cp_size": 2}):
        words = "use cp_size" if "sp_size" in sizes else "cp_size beside tp_size"
        with pytest.raises(UserError, match=words):
            SequenceGroupConfig(**sizes)
    with pytest.raises(UserError, match="accelerate knows of 1 of 2 processes"):
        Accelerator(parallelism_config=SequenceGroupConfig(cp_size=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    one_each = [dist.new_group([rank]) for rank in range(2)]
    refused(
        "is 4, but there are 2 processes",
        lambda: prepare(model, parallelism_config=SequenceGroupConfig(cp_size=4)),
    )
    refused(
        "dp_shard_size=2 shards weights by FSDP2",
        lambda: prepare(model, parallelism_config=SequenceGroupConfig(cp_size=1, dp_shard_size=2)),
    )

    def with_batches(**options: Any) -> None:
        accelerator = Accelerator(cpu=True, parallelism_config=SequenceGroupConfig(cp_size=2))
        for name, value in options.items():
            setattr(accelerator.dataloader_config, name, value)
        accelerator.prepare(DataLoader(rows, batch_size=2, collate_fn=shared_sequences.padded))

    refused("dispatch_batches=True", lambda: with_batches(dispatch_batches=True))

    def different_rows() -> None:
        accelerator = Accelerator(cpu=True, parallelism_config=SequenceGroupConfig(cp_size=2))
        torch.manual_seed(dist.get_rank())
        loader = accelerator.prepare(DataLoader(rows, 1, shuffle=True, collate_fn=shared_sequences.padded))
        wrapped = accelerator.prepare(adjoint.wrap(model, METHOD))
        for batch in loader:
            wrapped(**batch)

    refused("must call with the same rows.*shuffle", different_rows)
    adjoint.hf.wrap.unwrap(model)

    def train(**options: Any) -> None:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to="none",
            max_steps=1,
            remove_unused_columns=False,
            parallelism_config=SequenceGroupConfig(cp_size=2),
            **options,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=shared_sequences.padded,
            callbacks=[AdjointCallback(METHOD)],
        )
        trainer.train()

    refused("average_tokens_across_devices=False", lambda: train(average_tokens_across_devices=False))
    adjoint.hf.wrap.unwrap(model)
    words = r"no rank has the hidden states.*; leave sequence_group, or accelerate's cp_size, out$"
    refused(words, lambda: train(label_smoothing_factor=0.1))
    adjoint.hf.wrap.unwrap(model)

    # as on GPUs, where accelerate takes its own configuration
    shared_sequences.as_gpus()
    sizes = {"parallelism_config": ParallelismConfig(sp_size=2)}
    refused(
        "sp_size is DeepSpeed's.*use cp_size", lambda: prepare(lambda: adjoint.wrap(model, METHOD), **sizes)
    )
    refused("sp_size is DeepSpeed's.*use cp_size", lambda: prepare(adjoint.wrap(model, METHOD), **sizes))
    adjoint.hf.wrap.unwrap(model)
    fsdp2 = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    accelerates = {"parallelism_config": ParallelismConfig(cp_size=2), **fsdp2}
    refused("backprop has no chunks", lambda: prepare(adjoint.wrap(model, adjoint.Backprop()), **accelerates))
    adjoint.hf.wrap.unwrap(model)
    refused(
        "cp_size needs FSDP2",
        lambda: prepare(
            model,
            parallelism_config=SequenceGroupConfig(cp_size=2),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1),
        ),
    )
    group = one_each[dist.get_rank()]
    assert group is not None
    state = adjoint.wrap(model, METHOD).__dict__["_adjoint"]
    state.group = group  # of one rank, which wrap would leave out
    refused(
        r"sequence_group has the ranks \[\d\], but by accelerate's cp_size",
        lambda: prepare(model, **accelerates),
    )


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    """Torch's own context parallelism is never entered."""
    on_ranks(2, tmp_path, check_refusals, str(tmp_path))


def test_trainers_that_deal_prompts_and_rewards_are_refused(tmp_path: Path) -> None:
    """Also where the sizes come from the environment, which TRL's own check does not see."""
    from adjoint.hf.parallelism_config import _RefuseArguments
    from adjoint.integrations.accelerate import SequenceGroupConfig

    trl = pytest.importorskip("trl")
    from accelerate.state import AcceleratorState

    arguments = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    AcceleratorState._shared_state["parallelism_config"] = SequenceGroupConfig(cp_size=2)
    with pytest.raises(UserError, match="GRPOConfig: cp_size: its trainer deals prompts and rewards"):
        _RefuseArguments().on_train_begin(arguments, None, None)


def test_the_configuration_is_read_as_accelerate_reads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from adjoint.integrations.accelerate import SequenceGroupConfig

    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    config = SequenceGroupConfig()
    assert str(config) == "SequenceGroupConfig(dp_replicate_size=2, dp_shard_size=1, cp_size=3)"
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (6, 2, 3)
    assert not config.cp_enabled and not config.tp_enabled
    with pytest.raises(UserError, match="cp_size must be 1 or more"):
        SequenceGroupConfig(cp_size=0)


def make_two_accelerators() -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState

    shared_sequences.rank_environment()
    model = adjoint.wrap(make("LlamaForCausalLM", torch.float32), METHOD)
    batch = shared_sequences.padded(shared_sequences.documents(2))
    config, losses = ParallelismConfig(cp_size=2), []
    for _ in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        prepared = Accelerator(cpu=True, parallelism_config=config).prepare_model(model, evaluation_mode=True)
        losses.append(prepared(**batch).loss)
        assert dist.get_process_group_ranks(vars(model)["_adjoint"].group) == [0, 1]
    assert torch.equal(*losses)


def test_a_copy_of_a_wrapped_model_shares_sequences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only loads one has called no `wrap`; torch's context parallelism would split inputs."""
    from adjoint.hf import parallelism_config

    calls: list[int] = []
    model = adjoint.wrap(make("LlamaForCausalLM", torch.float32), METHOD)
    monkeypatch.setattr(parallelism_config, "install", lambda: calls.append(1))
    copy.deepcopy(model)
    assert calls


def test_a_model_goes_on_where_accelerates_state_is_reset(tmp_path: Path) -> None:
    """TrainingArguments reset it; the next Accelerator makes a mesh of its own."""
    on_ranks(2, tmp_path, make_two_accelerators)


# ------------------------------------------------------------------------------------------ TRL's fused head

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def fused_head_values(model: Any, weight: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the fused head's values, and gradients of a sum that weighs log-probabilities and entropies."""
    ids = make_ids(2, 45, vocab_size=61)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    (output.log_probs * weight + 0.3 * output.entropy * weight.square()).sum().backward()
    values = [output[name].detach().double() for name in (*OUTPUTS, "loss", "label_mask")]
    return values, [p.grad for p in model.parameters()]


def compare_fused_heads() -> None:
    from trl.trainer import utils

    shared_sequences.rank_environment()
    weight = torch.randn(2, 44, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for is_shared in (False, True):
        model = make("BambaForCausalLM", torch.float64)
        if is_shared:
            adjoint.wrap(model, METHOD, sequence_group=dist.group.WORLD)
        utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
        results.append(fused_head_values(model, weight))
    for expected, result in zip(*results, strict=True):
        for a, b in zip(expected, result, strict=True):
            assert (a - b).abs().max() <= 1e-6 * max(1, a.abs().max())  # Bamba's norms are in float32


def test_values_of_trls_fused_head_come_from_all_ranks(tmp_path: Path) -> None:
    skip_without_fused_head()
    on_ranks(2, tmp_path, compare_fused_heads)


def train_on_preferences(name: str, folder: str, file: str) -> None:
    from adjoint.integrations import AdjointCallback
    from adjoint.integrations.accelerate import SequenceGroupConfig

    options: dict[str, Any] = {"max_steps": 3, "callbacks": [AdjointCallback(METHOD)]}
    if dist.is_initialized():
        shared_sequences.rank_environment()
        options["parallelism_config"] = SequenceGroupConfig(cp_size=2)
    trainer = trl_trainer(TRL[name], Path(folder), False, **options)
    trainer.train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save([logged(trainer, key) for key in ("loss", "grad_norm")], Path(folder) / file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPO", "DPO with LoRA", "KTO"])
def test_trainers_of_preferences(name: str, tmp_path: Path) -> None:
    """Their log-probabilities are those of the fused head."""
    skip_without_fused_head()
    trl_model(TRL[name], tmp_path)
    in_a_process(train_on_preferences, name, str(tmp_path), "alone.pt")
    on_ranks(2, tmp_path, train_on_preferences, name, str(tmp_path), "shared.pt")
    alone, shared = (torch.load(tmp_path / file) for file in ("alone.pt", "shared.pt"))
    for expected, result in zip(alone, shared, strict=True):
        assert len(expected) == 3 and (result - expected).abs().max() <= 1e-5
