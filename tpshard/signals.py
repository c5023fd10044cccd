"""The signals that ask a run to end: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a terminal that has gone.

Each unwinds the run like Ctrl-C, so that what was begun is removed. A signal that is ignored where the
process starts (``nohup``, a job in the background) stays ignored.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # of typing, whose import would delay the first handler
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """A signal has asked the run to end; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def cause(self) -> str:
        """In a word for people."""
        return "interrupted" if self.number == signal.SIGINT else f"ended by {signal.Signals(self.number).name}"

    @property
    def exit_status(self) -> int:
        """128 and the signal's number, as shells count: 130, 143, 129."""
        return 128 + self.number


def end_at_once(message: str) -> None:
    """Have the signals end the process with their exit status; ``message`` goes to stderr unless it is empty.

    For the time in which there is nothing to clean up.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if message:
                os.write(2, f"{message}\n".encode())
        finally:  # also where stderr is closed
            os._exit(128 + number)

    _handle(end)


def raise_in_main_thread() -> None:
    """Have the first of the signals raise :class:`Ended`; later ones do not disturb the cleaning up."""

    def unwind(number: int, frame: FrameType | None) -> None:
        _handle(overhear)
        raise Ended(number)

    def overhear(number: int, frame: FrameType | None) -> None:
        """Not SIG_IGN, of which Python complains where another signal has arrived already."""

    _handle(unwind)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for name in _ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
