"""`Stack`: its modules (`structure`), what it is to the engine (`chunked`), and its calls (`calls`).

`recurrence` and `bidirectional` use the engine without its grid of layers and chunks."""

from adjoint.stack.calls import Stack, StackOutput
from adjoint.stack.chunked import StackCall
from adjoint.stack.structure import WHOLE_SEQUENCE

__all__ = ["WHOLE_SEQUENCE", "Stack", "StackCall", "StackOutput"]
