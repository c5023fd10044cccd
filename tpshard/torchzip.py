"""The zip archive that ``torch.save`` writes since 1.6: where each stored entry's bytes lie.

Only what torch itself writes is read: stored (uncompressed) entries, zip64 where it is needed, no
comment after the directory (PKWARE APPNOTE 6.3.10, 4.3 and 4.5.3). Nothing but the directory and the
local headers that are asked for is read, so the same code works where the tensors' bytes are absent.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.header import Read, read_exactly

MAX_DIRECTORY_BYTES = 64 << 20
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_AGAIN = "Download or copy the file again."


class Entry(NamedTuple):
    """One entry of the archive; :meth:`Archive.locate` finds where its bytes begin."""

    name: str
    header_at: int  # bytes, of its local header
    nbytes: int


class Archive:
    """The directory of a zip archive of ``size`` bytes behind ``read``.

    :class:`DamagedError` where the directory does not fit the file, :class:`UnsupportedError` for
    compressed or encrypted entries.
    """

    def __init__(self, read: Read, size: int, name: str) -> None:
        self.read = read
        self.size = size
        self.name = name
        self.entries: dict[str, Entry] = {}
        count, at, nbytes, limit = self._end()
        if nbytes > MAX_DIRECTORY_BYTES or at + nbytes != limit or count * _CENTRAL.size > nbytes:
            raise self._damaged(f"its directory of {count:,} entries and {nbytes:,} bytes does not fit")
        self.directory_at = at
        self._fill(read_exactly(read, at, nbytes, name, size), count)

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.name}: as a zip archive of {self.size:,} bytes, {why}. {_AGAIN}")

    def _end(self) -> tuple[int, int, int, int]:
        """Number of entries, position and size of the directory, and where it has to end."""
        if self.size < _END.size:
            raise self._damaged("it is cut short")
        end_at = self.size - _END.size
        fields = _END.unpack(read_exactly(self.read, end_at, _END.size, self.name, self.size))
        if fields[0] != b"PK\5\6" or fields[7]:
            raise self._damaged("it has no end record: it is cut short, or something follows it")
        count, nbytes, at = fields[4], fields[5], fields[6]
        if count != 0xFFFF and nbytes != 0xFFFFFFFF and at != 0xFFFFFFFF:
            # torch writes the 64-bit records even where it does not need them.
            return count, at, nbytes, self._end64(end_at)[3] if at + nbytes != end_at else end_at
        return self._end64(end_at)

    def _end64(self, end_at: int) -> tuple[int, int, int, int]:
        locator_at = end_at - _LOCATOR.size
        if locator_at < 0:
            raise self._damaged("it has no 64-bit end record")
        mark, _, at64, _ = _LOCATOR.unpack(read_exactly(self.read, locator_at, _LOCATOR.size, self.name, self.size))
        if mark != b"PK\6\7" or at64 + _END64.size != locator_at:
            raise self._damaged("its 64-bit end record is not where it should be")
        fields = _END64.unpack(read_exactly(self.read, at64, _END64.size, self.name, self.size))
        if fields[0] != b"PK\6\6":
            raise self._damaged("its 64-bit end record is not where it should be")
        return fields[7], fields[9], fields[8], at64

    def _fill(self, raw: bytes, count: int) -> None:
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(raw):
                raise self._damaged("its directory is cut short")
            fields = _CENTRAL.unpack_from(raw, at)
            flags, method, packed, plain = fields[3], fields[4], fields[8], fields[9]
            name_nbytes, extra_nbytes, comment_nbytes, header_at = fields[10], fields[11], fields[12], fields[16]
            at += _CENTRAL.size
            name = raw[at : at + name_nbytes].decode("utf-8", "backslashreplace")
            at += name_nbytes
            extra = raw[at : at + extra_nbytes]
            at += extra_nbytes + comment_nbytes
            if fields[0] != b"PK\1\2" or at > len(raw):
                raise self._damaged(f"its directory entry {name!r:.200} is damaged")
            if 0xFFFFFFFF in (packed, plain, header_at):
                packed, plain, header_at = self._wide(name, extra, packed, plain, header_at)
            if method != 0 or packed != plain or flags & 1:
                raise UnsupportedError(
                    f"{self.name}: the entry {name!r:.200} is compressed or encrypted (method {method}, {packed:,} of "
                    f"{plain:,} bytes); torch stores them plainly. Save the weights again, as safetensors."
                )
            if name in self.entries:
                raise self._damaged(f"the entry {name!r:.200} is there twice")
            self.entries[name] = Entry(name, header_at, plain)
        if at != len(raw):
            raise self._damaged("its directory is longer than its entries")

    def _wide(self, name: str, extra: bytes, packed: int, plain: int, header_at: int) -> tuple[int, int, int]:
        at = 0
        while at + 4 <= len(extra):
            tag, nbytes = struct.unpack_from("<2H", extra, at)
            if tag == 1:
                field = extra[at + 4 : at + 4 + nbytes]
                wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
                try:
                    plain = next(wide) if plain == 0xFFFFFFFF else plain
                    packed = next(wide) if packed == 0xFFFFFFFF else packed
                    header_at = next(wide) if header_at == 0xFFFFFFFF else header_at
                except StopIteration:
                    break
                return packed, plain, header_at
            at += 4 + nbytes
        raise self._damaged(f"the 64-bit sizes of the entry {name!r:.200} are missing")

    def locate(self, entry: Entry) -> int:
        """Where the entry's bytes begin; :class:`DamagedError` where they do not end before the directory."""
        if entry.header_at + _LOCAL.size > self.directory_at:
            raise self._damaged(f"the entry {entry.name!r:.200} lies beyond its end")
        raw = read_exactly(self.read, entry.header_at, _LOCAL.size, self.name, self.size)
        fields = _LOCAL.unpack(raw)
        if fields[0] != b"PK\3\4":
            raise self._damaged(f"the header of the entry {entry.name!r:.200} is damaged")
        begin = entry.header_at + _LOCAL.size + int(fields[9]) + int(fields[10])
        if begin + entry.nbytes > self.directory_at:
            raise self._damaged(f"the entry {entry.name!r:.200} of {entry.nbytes:,} bytes runs into the directory")
        return begin
