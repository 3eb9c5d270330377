"""The compiled kernels of another processor, run here by qemu: with ADJOINT_EMULATE=aarch64 the tests of this
folder have each call of a C++ kernel done by a program compiled for that processor.

Memory goes to the program by a file and comes back the same way, so values are what that processor's code
computes; times say nothing. It needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu,
qemu-user).
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from adjoint.kernels.cpu import backend
from adjoint.kernels.cpu import build as cpu_build

HERE = Path(__file__).parent
MARCH = {"aarch64": "armv8-a"}


def program(processor: str, folder: Path) -> list[str]:
    """The command that runs a call; compiled into `folder`."""
    made = folder / "emulated"
    sources = [HERE / "emulated.cpp", *(Path(cpu_build.__file__).parent / name for name in cpu_build.SOURCES)]
    names = re.findall(r"void adjoint_(\w+)_f32\(", "".join(Path(file).read_text() for file in sources[1:]))
    kernels = f"-DKERNELS(X)={' '.join(f'X({name})' for name in names)}"
    flags = ["-O3", *cpu_build.FLAGS, f"-march={MARCH[processor]}", "-static", kernels]
    subprocess.run([f"{processor}-linux-gnu-g++", *flags, "-o", str(made), *map(str, sources)], check=True)
    return [f"qemu-{processor}", str(made)]


def pointers(args: ctypes.Structure, at: int = 0) -> list[tuple[int, int]]:
    """Of the pointers in a structure that are set: their places in it, and where they point."""
    found = []
    for name, kind in args._fields_:
        place, value = at + getattr(type(args), name).offset, getattr(args, name)
        if kind is ctypes.c_void_p and value:
            found.append((place, value))
        elif isinstance(value, ctypes.Structure):
            found += pointers(value, place)
    return found


def install(processor: str) -> None:
    """Has this process's calls of the cpu backend done by the emulated program."""
    folder = tempfile.TemporaryDirectory()
    command = program(processor, Path(folder.name))
    lanes = int(subprocess.check_output(command))

    def call(name: str, dtype: torch.dtype, reference: Any, *flags: int) -> None:
        args: ctypes.Structure = reference._obj
        tensors = vars(args).values()  # all to which it points
        storages = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
        places = []
        for at, value in pointers(args):
            (number,) = (
                i for i, s in enumerate(storages) if s.data_ptr() <= value < s.data_ptr() + max(1, s.nbytes())
            )
            places.append((at, number, value - storages[number].data_ptr()))
        suffix = {torch.float32: "f32", torch.float64: "f64"}[dtype]
        parts = [f"adjoint_{name}_{suffix}".encode().ljust(64, b"\0")]
        parts.append(struct.pack("5q", *(*flags, 0)[:2], ctypes.sizeof(args), len(places), len(storages)))
        parts.append(bytes(args))
        parts += [struct.pack("3q", *place) for place in places]
        parts += [struct.pack("2q", s.nbytes(), s.data_ptr() % 64) for s in storages]
        parts += [ctypes.string_at(s.data_ptr(), s.nbytes()) for s in storages]
        with tempfile.NamedTemporaryFile(dir=folder.name) as file:
            file.write(b"".join(parts))
            file.flush()
            subprocess.run([*command, file.name], check=True)
            file.seek(sum(map(len, parts[: -len(storages)])))
            for s in storages:
                ctypes.memmove(s.data_ptr(), file.read(s.nbytes()), s.nbytes())

    backend._function = lambda name, dtype: functools.partial(call, name, dtype)
    backend._vector_bytes = lambda: lanes
    backend._emulated = folder  # type: ignore[attr-defined]  # it goes when the process ends
