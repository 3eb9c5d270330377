"""Text to token ids to batches: where text comes from, tokenizers, the cache of tokens, batches."""
