"""Hugging Face models, their cache being the state: `adjoint.wrap`.

Raises:
    UserError: transformers is missing, or older than the oldest release tested.
"""

from adjoint import releases
from adjoint.errors import UserError, why_not_imported

_REMEDY = f"pip install -U '{releases.requirement('transformers')}'"

try:
    import transformers
except ImportError as error:
    raise UserError(f"adjoint.wrap {why_not_imported(error, 'transformers', _REMEDY)}") from error

if releases.status("transformers") == "too old":
    raise UserError(
        f"adjoint.wrap needs transformers {releases.oldest('transformers')} or later, "
        f"{transformers.__version__} is installed: {_REMEDY}"
    )
releases.warn_if_untested("transformers")
