"""Layouts of engines: what a serving or training program calls its tensors, what it fuses, how it names its files."""
