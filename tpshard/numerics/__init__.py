"""The numeric verifier: runs the ranks and the original with the model's own code, and compares them.

Only this subpackage imports torch and transformers; everything else of tpshard does without. Call
:func:`require` before any of its modules is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re

from tpshard.errors import UnsupportedError

INSTALL = "pip install 'tpshard[verify]' (in a clone of tpshard: pip install '.[verify]')"
OLDEST = {"torch": (2, 6), "transformers": (5, 0)}


def require() -> dict[str, str]:
    """The versions of what the verifier needs.

    Raises:
        UnsupportedError: torch or transformers is missing, older than what is supported, or cannot be imported.
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
    for package, version in found.items():
        try:
            importlib.import_module(package)
        except Exception as error:  # whatever a broken installation raises
            raise UnsupportedError(
                f"{package} {version} is installed, but importing it fails "
                f"({type(error).__name__}: {str(error).strip()[:300]}); install it again: {INSTALL}"
            ) from None
    return found
