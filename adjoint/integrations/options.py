"""The method of a wrapped model from names and values, as a configuration or the environment has them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from adjoint.errors import UserError
from adjoint.methods import Backprop, Exact, Method, MiniSequence, Truncated
from adjoint.settings import hints_of, read_value
from adjoint.train.flags import nearest

# The methods that `adjoint.wrap` takes, by name.
WRAPPED_METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Exact, Truncated, MiniSequence, Backprop)
}
PREFIX = "ADJOINT_METHOD__"


def method_from_options(options: Mapping[str, object], section: str = "adjoint") -> Method:
    """Return the method that options describe; without any, `Exact()`.

    Args:
        options: `name`, which is "exact" if it is missing, and arguments of that method. Values may be text.
        section: stands before an option's name in messages.

    Raises:
        UserError: there is no such method or option, or a value does not fit.
    """
    name = options.get("name", Exact.name)
    if name not in WRAPPED_METHODS:
        raise UserError(f"{section}.name: expected one of {', '.join(WRAPPED_METHODS)}, got {name!r}")
    method = WRAPPED_METHODS[str(name)]
    hints, arguments = hints_of(method), dict[str, object]()
    for key, value in options.items():
        if key == "name":
            continue
        if key not in hints:
            guess = nearest(key, hints)
            suggestion = f"did you mean {guess}?" if guess else f"it takes {', '.join(hints)}"
            raise UserError(f"{section}.{key}: the method {name!r} has no such option; {suggestion}")
        try:
            arguments[key] = read_value(value, hints[key])
        except ValueError as error:
            raise UserError(f"{section}.{key}: {error}") from error
    missing = [f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING]
    if lacking := [key for key in missing if key not in arguments]:
        raise UserError(f"{section}.{lacking[0]}: the method {name!r} needs it")
    try:
        return method(**arguments)
    except ValueError as error:
        raise UserError(f"{section} ({name}): {error}") from error


def method_from_environment() -> Method:
    """Return the method that the environment describes, as by `ADJOINT_METHOD__CHUNK_SIZE=4096`.

    These are the variables of `adjoint train`. Frameworks whose configuration can name a module, but give it
    nothing, take the method from here.

    Raises:
        UserError: as `method_from_options`.
    """
    options = {
        variable.removeprefix(PREFIX).lower(): value
        for variable, value in sorted(os.environ.items())
        if variable.startswith(PREFIX)
    }
    return method_from_options(options, "method")
