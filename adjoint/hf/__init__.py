"""Hugging Face models, their cache being the state: `adjoint.wrap`. Written for transformers 5.21 to 5.23.

Raises:
    UserError: transformers is missing, or older than OLDEST.
"""

import re

from adjoint.errors import UserError

# Since 5.21 Mamba-1's mixers call their scan by the name that `hf.kernels.replacements` rebinds.
OLDEST = (5, 21)

_REMEDY = "pip install -U 'transformers>={}.{},<6'".format(*OLDEST)

try:
    import transformers
except ImportError as error:
    raise UserError(f"adjoint.wrap needs transformers: {_REMEDY}") from error

if tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2]) < OLDEST:
    raise UserError(
        f"adjoint.wrap needs transformers {OLDEST[0]}.{OLDEST[1]} or later, {transformers.__version__} is "
        f"installed: {_REMEDY}"
    )
