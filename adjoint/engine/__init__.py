"""The engine: tiles, programs of them, and what carries programs out."""
