"""The benchmark of GPUs that wait for their host, on a CPU."""

from __future__ import annotations

from benchmarks import host_waits
from benchmarks.gpu.points import TINY


def test_a_step_on_a_cpu_has_a_time_and_no_work_of_a_gpu() -> None:
    (checkpointed, chunked) = host_waits.HostWaits().points(
        host_waits.HostWaits().parse(
            ["--device", "cpu", "--models", "mamba-1.27b", "--lengths", "64", "--chunk-sizes", "16"]
        )
    )
    rows = []
    for point in checkpointed, chunked:
        result = host_waits.measure(point | {"model": TINY, "autocast": None})
        assert result["step_s"] > 0 and "gpu_s" not in result
        rows.append({field: point[field] for field in ("hybrid", "length", "chunk_size")} | result)
    assert abs(rows[0]["gradient_norm"] / rows[1]["gradient_norm"] - 1) < 1e-4
    lines = host_waits.table(rows).splitlines()
    assert "| 64 | checkpointing |" in lines[2] and "| 64 | chunks of 16 |" in lines[3]
