"""``tpshard selftest``: faults are planted in tiny shards, and the verifier must see every one, at its place.

And it must be silent about good shards, and about those that differ in bytes only. Whoever reads "passed"
knows with this what the word is worth.
"""

from __future__ import annotations
