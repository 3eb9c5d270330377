"""The record of an operation: a part that is missing fails at import, and the message names it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adjoint.kernels import dispatch, operation
from adjoint.kernels.operation import BACKENDS, Code, Operation, all_operations

PARTS = [field.name for field in dataclasses.fields(Operation)]
COMPLETE = all_operations()["selective_scan"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_left_out_is_named(part: str) -> None:
    parts = {name: getattr(COMPLETE, name) for name in PARTS if name != part}
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        Operation(**parts)
    with pytest.raises(TypeError, match=f"{part} is missing or wrong; it should be "):
        Operation(**parts, **{part: None})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_is_left_out_is_named(backend: str) -> None:
    backends = {name: code for name, code in COMPLETE.backends.items() if name != backend}
    said = rf"operation 'selective_scan': backends\['{backend}'\] is missing or wrong; .* None to leave it"
    with pytest.raises(TypeError, match=said):
        dataclasses.replace(COMPLETE, backends=backends)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"operator": "selective_scna"}, "operator is missing or wrong; .* torch.ops.adjoint"),
        ({"backends": {"cpu": None, "triton": None, "cuda": None}}, "not of {'cuda'}"),
        (
            {"backends": {"cpu": None, "triton": Code("adjoint.kernels.selective_scan.triton.launch")}},
            r"backends\['triton'\] is missing or wrong; .* saved_shape, the shape",
        ),
        *(
            (
                {"backends": {"cpu": None, "triton": Code(f"adjoint.kernels.{module}")}},
                rf"backends\['triton'\] .* there is no adjoint.kernels.{module}",
            )
            for module in ("selective_scan.tritn", "selective_scna.triton")
        ),
    ],
)
def test_a_wrong_part_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"operation 'selective_scan': .*{said}"):
        dataclasses.replace(COMPLETE, **changed)


@pytest.mark.parametrize("function", ["forward", "backward", "saved_shape"])
def test_a_function_that_a_module_lacks_is_named(function: str) -> None:
    """The reference's when the record is made, another backend's when its module is imported."""
    lacking, name = ModuleType("lacking"), f"selective_scan_{function}"
    vars(lacking).update({k: v for k, v in vars(COMPLETE.reference).items() if k not in (name, "__name__")})
    with pytest.raises(TypeError, match=f"the function {name} is missing in lacking"):
        dataclasses.replace(COMPLETE, reference=lacking)
    with pytest.raises(TypeError, match=f"the function {name} is missing in lacking .triton"):
        operation.implementation_in(lacking, COMPLETE, "triton")


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("name", dispatch.operations())
def test_every_backend_has_the_functions_of_its_record(name: str, backend: str) -> None:
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    code = dispatch.load(name, backend)
    record = all_operations()[name]
    assert code.backend == ("reference" if record.backends.get(backend) is None else backend)
    if backend == "triton" and record.saves_states:  # what plans read without Triton
        assert code.saved_shape is record.backends[backend].saved_shape


def test_a_folder_without_a_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cumulative_max").mkdir()
    (tmp_path / "cumulative_max" / "__init__.py").write_text("")
    package = importlib.import_module(operation.PACKAGE)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    with pytest.raises(TypeError, match=r"adjoint.kernels.cumulative_max registers no operation"):
        all_operations.__wrapped__()
    sys.modules.pop("adjoint.kernels.cumulative_max")


def test_two_operations_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="'selective_scan' is registered twice"):
        operation.register(COMPLETE)
