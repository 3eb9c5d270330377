"""Break the code behind a promise, and see a test fail: ``make test-mutations [PART="hooks windows"]``.

A test that passes whatever the code does proves nothing. Each row of `MUTATIONS` changes one line in a copy
of the repository, so that a promise of docs/promises.md no longer holds, and runs the tests of that promise.
The table that is printed says which test failed. The script fails if all of a row's tests pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROMISES = "tests/hf/test_wrap_promises.py::"


class Mutation(NamedTuple):
    """A change of one line.

    Attributes:
        promise: what no longer holds.
        file: below `adjoint/`.
        line: text that is in the file once.
        broken: the text in its place.
        tests: arguments of pytest, of which some test must fail.
    """

    promise: str
    file: str
    line: str
    broken: str
    tests: str


MUTATIONS: dict[str, Mutation] = {
    "adjoint-states": Mutation(
        "gradients cross the edges of chunks",
        "engine/exchange.py",
        'values.store["dS", k, c - 1] = self._scaled(values, k, c, d_recurrent)',
        'values.store["dS", k, c - 1] = (None,) * len(d_recurrent)',
        "tests/engine/test_exact.py",
    ),
    "recorded-weights": Mutation(
        "a recording serves all layers of a kind, with each one's weights",
        "engine/programs.py",
        "if kind.copies_weights and not has_weights:",
        "if kind.copies_weights and bound is None:",
        "tests/engine/test_recorded_tiles.py",
    ),
    "head-sums": Mutation(
        "a head that runs twice for a chunk adds to its weight's sum once",
        "engine/tile.py",
        "is_added = self.unlisted_leaves.runs_again",
        "is_added = False",
        "tests/engine/test_leaves.py",
    ),
    "segment-tapes": Mutation(
        "a budget counts the inputs that segments of layers store",
        "engine/budget.py",
        "chunks * (measured.inputs + state)",
        "chunks * state",
        "tests/engine/test_segments.py",
    ),
    "recorded-tapes": Mutation(
        "a tape whose values another recording has overwritten is computed again",
        "engine/programs.py",
        "if program.call is not None and self.runs != run:",
        "if False:",
        "tests/engine/test_recorded_tiles.py",
    ),
    "recorded-chunks": Mutation(
        "a recording that knows its chunk is not used for another one",
        "engine/programs.py",
        "any(dim is None and differs(a, b) for a, b, dim in pairs)",
        "False",
        "tests/engine/test_recorded_tiles.py",
    ),
    "unread-products": Mutation(
        "a recomputed layer's last product is left out only where nobody reads it",
        "kernels/unread.py",
        "_local.value = math.nan",
        "_local.value = 0.0",
        "tests/engine/test_segments.py",
    ),
    "documents": Mutation(
        "packed documents are kept apart",
        "engine/exchange.py",
        "if c and c not in values.grid.document_starts:",
        "if c:",
        "tests/hf/test_wrap.py::test_the_forms_of_a_call",
    ),
    "windows": Mutation(
        "Truncated drops adjoint states at edges a window apart, and nowhere else",
        "methods.py",
        "drop_every = None if self.window >= seqlen else self.window // size * size",
        "drop_every = None",
        "tests/hf/test_wrap.py",
    ),
    "recomputed-losses": Mutation(
        "a recomputed chunk must have the loss that it had",
        "engine/executor.py",
        "            if differs:",
        "            if False:",
        f"{PROMISES}test_noise_from_elsewhere_is_refused tests/engine/test_exact.py",
    ),
    "restored-settings": Mutation(
        "settings that changed after the forward are restored for the backward",
        "hf/snapshot.py",
        "undo_steps = self.restore_settings(current)",
        "undo_steps = []",
        f"{PROMISES}test_the_backward_finds_the_model_as_it_was",
    ),
    "written-tensors": Mutation(
        "tensors written to between forward and backward are an error",
        "engine/module_tensors.py",
        "if untrained.values is None or not _same_values(untrained.tensor, untrained.values):",
        "if False:",
        f"{PROMISES}test_what_cannot_be_undone_is_an_error",
    ),
    "changed-weights": Mutation(
        "the comparison runs again if precision or trained parameters have changed",
        "hf/snapshot.py",
        "if self.weights != other.weights:",
        "if False:",
        f"{PROMISES}test_a_weight_that_is_trained_later_is_looked_at_again",
    ),
    "tolerance": Mutation(
        "a model whose gradients by chunks differ is refused",
        "hf/verify/first_use.py",
        "GRADIENT_RTOL = 1e-4",
        "GRADIENT_RTOL = 1e4",
        "tests/hf/test_messages.py tests/hf/test_wrap_promises.py",
    ),
    "saved-configuration": Mutation(
        "a save on one rank is no difference between ranks that share a sequence",
        "parallel/agreement.py",
        'SAVED_ATTRIBUTES = {"architectures", "dtype"}',
        "SAVED_ATTRIBUTES = set[str]()",
        "tests/integrations/test_accelerate.py -k checkpoint",
    ),
    "evaluated-rows": Mutation(
        "evaluation counts each row once, however many ranks share it",
        "hf/parallelism_config.py",
        "if tensor.dim() == 0:",
        "if tensor.dim() >= 0:",
        "tests/integrations/test_accelerate.py -k evaluation",
    ),
    "same-rows": Mutation(
        "accelerate counts ranks that share a sequence as ranks with the same rows",
        "hf/parallelism_config.py",
        "return 1 if SCALES_BY_ALL_PROCESSES else self.tp_size",
        "return 1",
        "tests/integrations/test_accelerate.py -k accelerate_reads",
    ),
    "token-values": Mutation(
        "log-probabilities are those of all ranks that share a sequence",
        "parallel/context.py",
        "return self.transport.all_reduce(values, self.transport.ranks)",
        "return values",
        "tests/hf/test_token_logprobs.py -k ranks",
    ),
    "hooks": Mutation(
        "hooks of parameters do not fire without a gradient",
        "engine/step.py",
        "return None if gradient is None else self.hook(gradient)",
        "return self.hook(gradient)",
        f"{PROMISES}test_parameter_hooks_fire_once_and_not_without_a_gradient",
    ),
    "noise": Mutation(
        "dropout draws the same numbers again",
        "engine/generators.py",
        "        elif self.has_drawn:",
        "        elif False:",
        f"{PROMISES}test_noise_is_drawn_again",
    ),
    "documents-disagree": Mutation(
        "inputs that describe different documents are refused",
        "hf/chunking.py",
        "if not torch.equal(other_starts, is_start):",
        "if False:",
        f"{PROMISES}test_an_input_that_is_refused",
    ),
    "labels-of-padding": Mutation(
        "labels of padded tokens are refused",
        "hf/call.py",
        "if self.has_labels and bool(((self.targets != IGNORE_INDEX) & ~is_real).any()):",
        "if False:",
        f"{PROMISES}test_an_input_that_is_refused",
    ),
    "loss-functions": Mutation(
        "a loss_function that is no sum over tokens is refused",
        "hf/verify/loss_trial.py",
        "        _refuse(call, loss, padded)\n",
        "        pass\n",
        "tests/hf/test_other_losses.py",
    ),
    "embedding-noise": Mutation(
        "NEFTune's noise has the size that it has in the whole sequence",
        "hf/chunk_context.py",
        "share = 1.0 if self.seqlen is None else tokens / self.seqlen",
        "share = 1.0",
        "tests/hf/test_embedding_noise.py",
    ),
    "topk": Mutation(
        "keys are picked as in the whole sequence",
        "hf/kernels/topk.py",
        "        if whole_length == length:",
        "        if whole_length is not None:",
        "tests/hf/test_topk.py",
    ),
    "caches": Mutation(
        "gradients go on into the call that made a cache",
        "engine/continuation.py",
        "return tuple(tensor if _can_get_gradient(tensor) else tensor.detach() for tensor in state)",
        "return tuple(tensor.detach() for tensor in state)",
        "tests/hf/test_carried_state.py",
    ),
    "looped-depth": Mutation(
        "each run of a layer has cache layers of its own",
        "hf/transformers_api.py",
        "return [*range(start, stop)] * (getattr(config, loops) - 1)",
        "return []",
        "tests/hf/test_looped_depth.py",
    ),
    "near-names": Mutation(
        "a name that is only near a model's name is not answered",
        "tools/doctor/model_support.py",
        "all(VARIANT.fullmatch(word) for word in rest)",
        "True",
        "tests/tools/test_model_names.py",
    ),
    "ranks-agree": Mutation(
        "ranks of a sequence_group that call differently all stop",
        "parallel/context.py",
        "            if other is not None:\n",
        "            if False:\n",
        "tests/engine/test_sequence.py",
    ),
    "unseen-tapes": Mutation(
        "a checkpoint around a call does not see the tapes of its chunks",
        "engine/step.py",
        "    if hooks is None or",
        "    if True or",
        "tests/engine/test_around_calls.py -k alone",
    ),
    "one-thread": Mutation(
        "threads that train one stack have its gradients",
        "engine/module_tensors.py",
        "        return _locks.setdefault(model, ModelLock())\n",
        "        return ModelLock()\n",
        "tests/engine/test_concurrent_calls.py",
    ),
    "ranks-told": Mutation(
        "the ranks of a sequence_group are told that one has refused its call",
        "parallel/context.py",
        "        if _agreements.get(group, 0) == agreements:\n",
        "        if False:\n",
        "tests/engine/test_sequence.py -k refuses",
    ),
    "calls-of-ranks": Mutation(
        "calls under FSDP2 that differ between ranks are one line on every rank",
        "parallel/agreement.py",
        "    if high == -low:\n",
        "    if True:\n",
        "tests/hf/test_fsdp.py -k other_arguments",
    ),
    "waiting-threads": Mutation(
        "a thread that holds a model runs its own backwards: the device's thread may wait for the model",
        "kernels/checks.py",
        "torch.autograd.set_multithreading_enabled(is_multithreaded)",
        "torch.autograd.set_multithreading_enabled(True)",
        "tests/simulated_cuda/test_simulated_cuda.py -k holds_up",
    ),
    "own-errors": Mutation(
        "an error of the user's own code in a trial is raised itself",
        "engine/verification.py",
        "    if not is_from_user_code(error):\n",
        "    if True:\n",
        "tests/hf/test_wrap_promises.py -k own",
    ),
    "own-heads": Mutation(
        "norms of a rank's own heads get the sum of all ranks' gradients",
        "hf/tensor_parallel.py",
        "        _install(module, groups[0])",
        "        pass",
        "tests/hf/test_tensor_parallel.py",
    ),
    "branches-of-ranks": Mutation(
        "where ranks gather weights, gradients of branches reach their common beginning",
        "engine/turns.py",
        "                node.parent.add_cotangents(d_initial, node.parent_rows)",
        "                pass",
        "tests/test_rows_on_ranks.py -k beginnings",
    ),
    "loss-factor": Mutation(
        "under FSDP2 the loss may be scaled after the forward",
        "parallel/fsdp.py",
        "scale = 0.0 if d_loss is None else float(d_loss) / self.factor",
        "scale = 1.0",
        "tests/hf/test_fsdp.py",
    ),
    "delta-rule": Mutation(
        "the gated delta rule in C++ has the reference's gradients",
        "kernels/cpu/delta.cpp",
        "reading + writing + own[i] * load<T>(q.row(i) + x, L)",
        "reading + writing",
        "tests/kernels/test_operations.py -k gated_delta_rule-cpu",
    ),
    "scan-documents": Mutation(
        "a document's state does not reach the next in the SSD scan in C++",
        "kernels/cpu/ssd.cpp",
        "k.is_first ? T(0) : w.decays.whole, w.decays.less_one, w.B",
        "w.decays.whole, w.decays.less_one, w.B",
        "tests/kernels/test_operations.py -k ssd_scan-cpu",
    ),
    "resumed-runs": Mutation(
        "a resumed run ends with the same bits",
        "train/trainer.py",
        "        if rng:\n",
        "        if False:\n",
        "tests/train tests/cluster",
    ),
    "manifest-counts": Mutation(
        "a checkpoint at an address counts when its manifest is there",
        "checkpoint.py",
        "return (checkpoint / MANIFEST).is_file()",
        "return checkpoint.is_dir()",
        "tests/train/test_remote.py",
    ),
    "manifest-last": Mutation(
        "a manifest is uploaded last",
        "files/remote.py",
        "key=lambda file: (file.name == last, file)",
        "key=lambda file: (file.name != last, file)",
        "tests/train/test_remote.py",
    ),
    "store-refuses": Mutation(
        "a store that does not answer is never taken for a damaged checkpoint",
        "files/remote.py",
        "class RemoteError(UserError):",
        "class RemoteError(OSError):",
        "tests/train/test_remote.py",
    ),
    "distributed-pieces": Mutation(
        "a tensor is put together from the pieces that ranks have written",
        "files/distributed_checkpoint.py",
        "stream.seek(piece.offset)",
        "stream.seek(0)",
        "tests/train/test_distributed_checkpoint.py",
    ),
}


def survey(name: str) -> tuple[bool, str]:
    """Return whether a mutation makes a test fail, and its row: name, promise, what was broken, the test."""
    mutation = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for path in filter(None, tracked):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
        file = copy / "adjoint" / mutation.file
        file.write_text(file.read_text().replace(mutation.line, mutation.broken))
        command = [sys.executable, "-m", "pytest", "-q", "-x", *mutation.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(copy)}  # also of processes that tests start
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    first_failure = failed[0] if failed else f"NONE FAILED (exit status of pytest: {result.returncode})"
    return bool(failed), f"| {name} | {mutation.promise} | adjoint/{mutation.file} | {first_failure} |"


def main(names: list[str]) -> int:
    """Print the rows of mutations, by default of all; return 1 if one makes no test fail."""
    if unknown := [name for name in names if name not in MUTATIONS]:
        print(f"error: no {unknown[0]!r}; there are {', '.join(MUTATIONS)}", file=sys.stderr)
        return 2
    print("| mutation | promise that no longer holds | file | test that failed |\n| --- | --- | --- | --- |")
    survived = []
    for name in names or MUTATIONS:
        is_caught, row = survey(name)
        print(row, flush=True)
        survived += [] if is_caught else [name]
    if survived:
        print(f"no test failed: {', '.join(survived)}", file=sys.stderr)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
