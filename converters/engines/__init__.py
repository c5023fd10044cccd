"""One small table an engine: what it calls a model's tensors, what it fuses, and how it names its files."""
