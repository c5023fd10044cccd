"""Cut Hugging Face checkpoints into tensor-parallel per-rank files, re-cut them, join them, and prove it."""
