"""What tests that read a W&B run share."""

import struct
import time
import zlib
from pathlib import Path


def wandb_records(path):
    """The whole records of an offline run's file, which W&B may still be writing.

    The file is a LevelDB log behind 7 bytes: blocks of 32 KiB, chunks with 7 bytes of checksum, length and kind. W&B
    has no reader of it in Python any more (0.31). A last chunk that is cut, or not yet as its checksum says,
    ends the records: parsed as it is, a cut one is a ``DecodeError``.
    """
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[place : place + 7])
        chunk = data[place + 7 : place + 7 + length]
        if len(chunk) < length or zlib.crc32(bytes([kind]) + chunk) != checksum:
            return
        whole += chunk
        place += 7 + length
        if kind in (1, 4):  # a full chunk, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def finished_run(folder):
    """All records of the one offline run below a folder; W&B's own process may end a moment after ``finish``."""
    for _ in range(600):
        paths = list(Path(folder).rglob("*.wandb"))
        records = list(wandb_records(paths[0])) if paths else []
        if records and records[-1].WhichOneof("record_type") == "exit":
            assert len(paths) == 1
            return records
        time.sleep(0.1)
    raise AssertionError(f"W&B did not finish a run below {folder}: {len(records)} records in {paths}")
