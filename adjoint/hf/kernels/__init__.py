"""Our operations in the places of functions and modules of transformers and flash-linear-attention."""
