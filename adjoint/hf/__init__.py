"""Hugging Face models, their cache being the state: `adjoint.wrap`.

Raises:
    UserError: transformers is missing, or older than the oldest release tested.
"""

from adjoint import versions
from adjoint.errors import UserError

_REMEDY = f"pip install -U '{versions.requirement('transformers')}'"

try:
    import transformers
except ImportError as error:
    raise UserError(f"adjoint.wrap needs transformers: {_REMEDY}") from error

if versions.status("transformers") == "too old":
    raise UserError(
        f"adjoint.wrap needs transformers {versions.oldest('transformers')} or later, "
        f"{transformers.__version__} is installed: {_REMEDY}"
    )
versions.warn_if_untested("transformers")
