"""Tiny checkpoints of nearly every architecture that transformers ships; see :mod:`.models`."""

from __future__ import annotations

from .models import TASKS, architectures, class_of, tiny_config, variants, write

__all__ = ["TASKS", "architectures", "class_of", "tiny_config", "variants", "write"]
