"""Our operations in the places of transformers' and flash-linear-attention's functions and modules."""
