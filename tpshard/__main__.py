"""Where the program begins: the script ``tpshard`` and ``python -m tpshard``.

Loading the command line takes some tens of milliseconds, in which a signal must not give a traceback either:
so this module itself imports next to nothing, and has an early signal end the process at once.
"""

from __future__ import annotations

try:
    from .signals import end_at_once
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line and exit with the documented status."""
    end_at_once("interrupted; nothing was begun")
    from .cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
