"""Every Triton kernel, ours and those of the libraries that are installed, under the race checker."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.kernels import races
from tests.kernels.helpers import INTERPRETED, run_interpreted


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels already")
@pytest.mark.parametrize("group", races.groups(), ids=" ".join)
def test_no_kernel_races_or_leaves_its_tensors(group: list[str]) -> None:
    """And every kernel of ours is launched at all."""
    if (reason := races.absent(group[0])) is not None:
        pytest.skip(reason)
    printed = run_interpreted("-m", "tests.kernels.races", *group)
    assert all(f"| {target} | " in printed for target in group)


def test_an_unknown_target_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        races.main(["triton/ssd"])
    assert "no 'triton/ssd'; there are triton/causal_conv1d, " in capsys.readouterr().err
