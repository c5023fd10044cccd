"""``python -m tpshard``."""

from .cli import main

main()
