"""The phrases of README.md and docs/ that hold a number, by page, and where each number comes from.

A field such as {scan.forward_ms:.1f} is `forward_ms` of `benchmarks.numbers.scan`, in Python's format `.1f`
(`,.0f` where none is given). A phrase is just long enough to be found: `benchmarks/pages.py` looks for its
words on the page, whatever the lines, and compares the number between them.
"""

from __future__ import annotations

PHRASES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "takes {wrapped_growth.memory_bytes} times the memory for {wrapped_growth.length} times the length",
        "needs {few_states.memory:.1f} times as much memory for {few_states.length} times the length",
        "and {few_states.slower:.1f} times the time of `Exact()`",
        "Python {versions.python:.2f} to {versions.python_newest:.2f}",
        "transformers {versions.transformers:.1f} to {versions.transformers_newest:.2f}",
        "`Exact` takes {gain.method_memory} times less memory than backpropagation",
        "and {gain.method_slower:.1f} times its time",
        "ours take {gain.kernels_memory} times less memory and {gain.kernels_faster} times less time",
    ),
    "docs/cluster.md": (
        "(a 1g.5gb has {published.mig_1g_mib} MiB)",
        "48 helpers can reach at most {slices.most:.1f} of 56",
        "(at most {published.ray_mb} MB, `.gitignore` respected)",
        "declares it lost: some {published.ray_s} s after",
    ),
    "docs/convergence.md": (
        "Step sizes start in [{recall.slow_min:.3f}, {recall.slow_max:.1f}]",
        "with step sizes in [{recall.fast_min:.1f}, {recall.fast_max:.1f}]",
        "took {depth_study.minutes} minutes of one core",
        "by a median of {depth_study.gap_2:.2f} at two layers and {depth_study.gap_8:.2f} at eight",
        "{depth_study.gap_24:.2f} at 24 layers, {depth_study.gap_48:.2f} at 48",
        "seeds range from {depth_study.gap_min_48:.2f} to {depth_study.gap_max_48:.2f}",
        "its loss falls by {depth_study.local_fall:.2f}",
        "`Exact` falls by {depth_study.exact_fall:.2f}",
        "is at most {depth_study.truncated:.3f} above",
    ),
    "docs/finetune.md": ("{constants.weight_decay:.1f} on matrices",),
    "docs/gpu.md": (
        "under {constants.gpu_cap_gb} GB",
        "limited to {constants.gpu_cap_gb} GB",
        "may be {constants.as_good:.1f} times as far",
        "at least {constants.one_more:.2f} if all time",
    ),
    "docs/hosts.md": ("After {constants.silence_s} s of silence",),
    "docs/kernels.md": (
        "a warp executes {instructions.forward} in the forward and {instructions.backward} in the backward",
        "A multiprocessor holds {instructions.warps} warps of the backward kernel",
        "adds {instructions.forward_pass} and {instructions.backward_pass} instructions",
        "{held.weights} GiB of weights and AdamW's states, {held.gradients} of gradients",
        "{held.casts} of weights cast to bfloat16, {held.chunk} for one chunk of 6,656 tokens",
        "({held.token_mib:.1f} MiB per token over 48 layers)",
        "{held.states} of states at chunk edges: {held.all} GiB in all",
        "Backpropagation's {held.token_mib:.1f} MiB per token exceed {constants.h200_gib} GiB",
    ),
    "docs/long_memory.md": ("up to {loss_by_position.beyond} times",),
    "docs/method_costs.md": (
        "of {edges.parameters:.2f} billion parameters",
        "an edge is {edges.mb:.1f} MB",
        "store {edges.gb_1m:.1f} GB of edges",
        "{edges.token_tb:.1f} TB each",
        "{edges.logits_gb} GB at a million tokens",
        "take {mini_sequence.pieces_16k:.1f} GB at 16,384 tokens by `MiniSequence`",
        "unwrapped they take {mini_sequence.plain_8k:.1f} GB at 8,192 tokens",
    ),
    "docs/million_tokens.md": (
        "{sixteen_million.resident_gib:.2f} GiB of resident memory",
        "{sixteen_million.tokens_per_s} tokens per second",
        "took {sixty_four_million.few_16m} MiB at 16,777,216 tokens",
        "where `Exact()` took {sixty_four_million.all_16m} MiB",
        "agree to {sixty_four_million.digits} digits there",
        "it took {sixty_four_million.minutes} minutes",
        "with jemalloc {sixty_four_million.jemalloc_64m} MiB",
        "With glibc's allocator it took {sixty_four_million.few_64m} MiB",
    ),
    "docs/models.md": (
        "transformers {versions.transformers:.1f} to {versions.transformers_newest:.2f}",
        "`>` means {constants.beyond} times the longest measured",
    ),
    "docs/models_memory.md": (
        "took {single_process.first_mib} MiB at 8,192 tokens",
        "for the README's picture it took {single_process.second_mib} MiB",
    ),
    "docs/paper.md": (
        "takes up to {published.less_memory} times less memory than backpropagation at 1M tokens",
        "{figure_1.plain} times less, against backpropagation through a fused scan",
        "it is {published.speedup} times as fast on five instances",
        "40 GPUs in a pipeline do the work of {figure_6.gpus_1048576} at 1M tokens",
        "{products.minus}% at T̄ = 2,000",
        "plus gives {products.plus}%",
        "The {published.speedup} times of figure 6",
        "{published.gpu_gb} GB ÷ {published.vjp_mb:.1f} MB is {published.vjps} batches of vjps",
        "up to {published.tflops} TFLOPS",
    ),
    "docs/paper_claims.md": (
        "The count of the standard head is {whole.head}% and of the standard MLP {whole.mlp}%",
        "is {whole.short_gib:.1f} GiB too low",
        "takes {whole.slower:.1f} times as long at 80,000 tokens",
        "float32, {whole.weights_gib:.1f} GiB with its copies",
        "an A100's {constants.a100_gib} GiB",
    ),
    "docs/paper_figures.md": (
        "reports up to {published.less_memory} times less memory",
        "it is {figure_1.plain} times less, and {figure_1.checkpointing} times less than with checkpointing",
        "A factor of {published.less_memory} is possible",
        "(P 128, N 225, batch 8): {published.vjp_mb:.1f} MB read and written",
        "with its bubbles, {figure_6.network_gb} GB/s and {figure_6.latency_us} µs per message",
        "40 GPUs do the work of {figure_6.gpus_1048576} at 1M tokens, and of {figure_6.gpus_1024:.1f} at 1K",
        "gets {slices.busy:.1f} times one GPU; {slices.idle:.1f} if each task leaves",
    ),
    "docs/plan.md": (
        "adds {constants.reserved_cpu_mb} MB and a fifth",
        "{constants.reserved_cuda_gb:.2f} GB and a twentieth",
        "at {constants.reached}% of the data sheet's rates, and with {constants.bandwidth_gb} GB/s",
        "at {constants.reached_least}% and at {constants.reached_most}% of these rates",
        "the error is {shards.least_1:.1f}% for one shard, {shards.least_2} to {shards.most_2}% for two",
        "{shards.least_4} to {shards.most_4}% for four",
    ),
    "docs/promises.md": ("half precision allows {constants.coarse:.1f}",),
    "docs/results.md": (
        "Sequences {growth.length} times as long take {growth.memory_bytes:.2f} times the memory",
        "{growth.ms_per_token:.2f} times the time per token",
        "takes {scan.forward_ms:.1f} ms forward and {scan.both_ms} ms with its backward",
        "{scan.forward_loop} and {scan.both_loop} times as fast as a loop in PyTorch",
        "{scan.forward_roof}% and {scan.both_roof}% of the arithmetic roof",
        "at most {window_time.most:.1f} times the backward without one",
        "{window_time.dense:.1f} times with dense matrices",
    ),
}
