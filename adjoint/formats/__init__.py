"""Models in and out: other libraries' folders and files, and runs.

A format is a module and a row of one of two tables, and declares what `format.StackFormat` or
`format.FileFormat` lists. `FORMATS` has folders that become a `Stack`. They are read as they are: neither
transformers nor mamba-ssm need be installed. `FILE_FORMATS` has files that become models for `adjoint.wrap`,
wherever a command takes a folder of transformers.
"""

from pathlib import Path

from adjoint.formats import caduceus, mamba_ssm, rwkv7, transformers
from adjoint.formats.format import FileFormat, StackFormat
from adjoint.formats.names import Values

# By the name that `adjoint export --format` has for it. A later row is asked first whether it holds a folder.
FORMATS: dict[str, StackFormat] = {
    "transformers": transformers,
    "mamba-ssm": mamba_ssm,
    "caduceus": caduceus,
}
FILE_FORMATS: list[FileFormat] = [rwkv7]


def format_of(config_json: Values) -> str:
    """Return the name in `FORMATS` of the format of a folder with this config.json."""
    return next(name for name, row in reversed(FORMATS.items()) if row.holds(config_json))


def file_format_of(place: str | Path) -> FileFormat | None:
    """Return the format of a file that holds a model; None for a folder, and for what is not there."""
    return next((row for row in FILE_FORMATS if row.holds(Path(place))), None)


def file_format_to_write(file: str | Path) -> FileFormat | None:
    """Return the format of a file that is to be written, by its ending; None where it means a folder."""
    return next((row for row in FILE_FORMATS if Path(file).suffix == row.SUFFIX), None)


def file_kinds() -> str:
    """Return the kinds of files that hold a model, in words."""
    return " or ".join(f"{row.KIND} ({row.SUFFIX})" for row in FILE_FORMATS)


__all__ = ["FILE_FORMATS", "FORMATS", "file_format_of", "file_format_to_write", "file_kinds", "format_of"]
