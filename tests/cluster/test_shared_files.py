"""Whether other hosts see a run's files: here other folders stand for another host's disk."""

from __future__ import annotations

from pathlib import Path

from adjoint.cluster.shared_files import REMEDY, shared_files


def test_a_folder_that_another_host_does_not_see_is_named(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    for folder in (run, model):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    with shared_files(run, {"model.from_pretrained": model}) as files:
        assert files.problem("b") is None
        (model / "config.json").write_text("{ }")
        said = f"model.from_pretrained {model}: b has other files in it, unlike {files.host}; {REMEDY}"
        assert files.problem("b") == said
        (model / "config.json").unlink()
        model.rmdir()
        said = f"model.from_pretrained {model}: b does not have this folder, unlike {files.host}; {REMEDY}"
        assert files.problem("b") == said
        run.rename(tmp_path / "elsewhere")
        said = (
            f"run.dir {run}: b does not see the folder of {files.host} (No such file or directory); {REMEDY}"
        )
        assert files.problem("b") == said
        (tmp_path / "elsewhere").rename(run)
    assert not list(run.iterdir()), "the token is removed"
