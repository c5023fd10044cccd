"""The numeric verifier: runs the ranks and the original with the model's own code, and compares them.

Only this subpackage imports torch and transformers; everything else of tpshard does without. Call
:func:`require` before any of its modules is imported.
"""

from __future__ import annotations

import importlib.metadata
import re

from tpshard.errors import UnsupportedError

INSTALL = "pip install 'tpshard[verify]'"
OLDEST = {"torch": (2, 6), "transformers": (5, 0)}


def require() -> dict[str, str]:
    """The versions of what the verifier needs.

    Raises:
        UnsupportedError: torch or transformers is missing or older than what is supported.
    """
    found = {}
    for package, oldest in OLDEST.items():
        wanted = ".".join(map(str, oldest))
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UnsupportedError(
                f"{package} is not installed, and this level of verification runs the model with it "
                f"({package} {wanted} or newer): {INSTALL}"
            ) from None
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < oldest:
            raise UnsupportedError(f"{package} {version} is too old to run the model ({wanted} or newer): {INSTALL}")
        found[package] = version
    return found
