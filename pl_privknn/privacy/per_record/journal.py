"""An append-only file whose entries are on disk before ``append`` returns: state that can't be forgotten."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

from pl_privknn._files import sync, sync_folder

_logger = logging.getLogger(__name__)

_MAGIC = b"PRIVKNN\x01"
_HEADER = struct.Struct("<IIQQ")  # kind, checksum of the body chained to the entry before, sequence, length
_CHECK = struct.Struct("<I")  # checksum of the header
_OVERHEAD = _HEADER.size + _CHECK.size


class JournalError(RuntimeError):
    """The file is damaged, is in use elsewhere, or could not be written."""


class Journal:
    """A durable list of entries (kind, bytes) with one writer.

    *Durable*: :meth:`append` returns after the entry has been forced to disk. An entry that a crash cut short
    was never acknowledged and is dropped at the next opening. Each entry carries its sequence number and a
    checksum that continues the one before, so a changed, missing, doubled or reordered entry is found at
    opening, and the file is then refused, never repaired. Not found: entries cut off cleanly at the end, and
    an old copy put back in place of the file, unless what is written here is noted elsewhere too (see
    :attr:`IndividualFilter.mark <pl_privknn.privacy.per_record.filter.IndividualFilter.mark>`). The checksums guard
    against accidents, not against an owner who rewrites the file.

    *One writer*: a lock file beside it (``<name>.lock``) is held while the journal is open; a second opening,
    in this or another process, is refused. The lock goes with the process. A forked child can't write.

    Args:
        path: the file; if it does not exist it is made, readable by its owner only, with one entry ``first``.
        first: ``(kind, body)`` of the first entry of a new file.

    Attributes:
        entries: what the file held when it was opened.
        size: length of the file in bytes.

    Raises:
        JournalError: if the file is damaged or in use.
    """

    def __init__(self, path: str | Path, first: tuple[int, bytes]) -> None:
        self.path = Path(path).resolve()
        self._pid = os.getpid()
        self._descriptor: int | None = None
        self._sequence, self._checksum = 0, 0
        self._lock = FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise JournalError(
                f"{self.path} is in use; close the process or object that has it open"
            ) from None
        try:
            if self.path.exists():
                self.entries = self._open()
            else:
                self.entries = [first]
                self.rewrite(*first)
        except BaseException:
            self.close()
            raise

    def append(self, kind: int, body: bytes) -> None:
        """Write one entry and force it to disk.

        Raises:
            JournalError: if the journal is closed or was opened by another process, or if writing fails.
                After a failure it is closed, since nobody knows what reached the disk: open it again.
        """
        descriptor = self._writable()
        entry, checksum = _encode(kind, body, self._sequence, self._checksum)
        try:
            _write(descriptor, entry)
            sync(descriptor)
        except BaseException as error:  # an interrupt too can leave half an entry behind
            self._fail(error)
        self.size += len(entry)
        self._sequence += 1
        self._checksum = checksum

    def rewrite(self, kind: int, body: bytes) -> None:
        """Replace all entries by one, atomically: a crash leaves either the old file or the new one.

        Raises:
            JournalError: as :meth:`append`.
        """
        if self._descriptor is not None:
            self._writable()
        entry, checksum = _encode(kind, body, 0, 0)
        fresh = Path(f"{self.path}.new")
        descriptor = None
        try:
            descriptor = os.open(fresh, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
            _write(descriptor, _MAGIC + entry)
            sync(descriptor)
            if os.name == "nt":  # an open file can't be replaced there
                os.close(descriptor)
                descriptor = None
                self._close_file()
            os.replace(fresh, self.path)
            sync_folder(self.path.parent)
            if descriptor is None:
                descriptor = os.open(self.path, _FLAGS)
                os.lseek(descriptor, 0, os.SEEK_END)
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
            self._fail(error)
        self._close_file()
        self._descriptor = descriptor
        self.size = len(_MAGIC) + len(entry)
        self._sequence, self._checksum = 1, checksum

    def close(self) -> None:
        """Close the file and give the lock back; may be called again."""
        self._close_file()
        if os.getpid() == self._pid:  # a forked child would give back its parent's lock
            self._lock.release(force=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Journal can't be copied or pickled; open its path in the process that writes")

    def _open(self) -> list[tuple[int, bytes]]:
        data = self.path.read_bytes()
        if not data.startswith(_MAGIC):
            self._damaged("it does not begin like a state file")
        entries: list[tuple[int, bytes]] = []
        at = len(_MAGIC)
        while at < len(data):
            rest = len(data) - at
            if rest < _OVERHEAD:
                break
            header = data[at : at + _HEADER.size]
            if data[at + _HEADER.size : at + _OVERHEAD] != _CHECK.pack(zlib.crc32(header)):
                # A file system may leave zeros where an append was cut short by a power failure.
                if any(data[at:]):
                    self._damaged(f"entry {self._sequence} is damaged")
                break
            kind, checksum, sequence, length = _HEADER.unpack(header)
            if sequence != self._sequence:
                self._damaged(f"entry {self._sequence} is missing")
            if rest < _OVERHEAD + length:
                break
            body = data[at + _OVERHEAD : at + _OVERHEAD + length]
            if checksum != zlib.crc32(body, self._checksum):
                self._damaged(f"entry {sequence} is damaged")
            entries.append((kind, body))
            self._sequence, self._checksum = sequence + 1, checksum
            at += _OVERHEAD + length
        if not entries:
            self._damaged("it has no entry")
        self._descriptor = os.open(self.path, _FLAGS)
        if at < len(data):
            _logger.warning("%s: dropped an entry that was cut short, hence never acknowledged", self.path)
            os.ftruncate(self._descriptor, at)
            sync(self._descriptor)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self.size = at
        return entries

    def _writable(self) -> int:
        if os.getpid() != self._pid:
            raise JournalError(f"{self.path} was opened by another process; only that one can write")
        if self._descriptor is None:
            raise JournalError(f"{self.path} is closed; open it again")
        return self._descriptor

    def _damaged(self, how: str) -> NoReturn:
        raise JournalError(f"{self.path} is refused: {how}; put back an undamaged copy that is up to date")

    def _fail(self, error: BaseException) -> NoReturn:
        self.close()
        if not isinstance(error, OSError):
            raise error
        raise JournalError(f"{self.path} could not be written ({error.strerror}); open it again") from error

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _encode(kind: int, body: bytes, sequence: int, previous: int) -> tuple[bytes, int]:
    checksum = zlib.crc32(body, previous)
    header = _HEADER.pack(kind, checksum, sequence, len(body))
    return header + _CHECK.pack(zlib.crc32(header)) + body, checksum


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
