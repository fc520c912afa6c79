"""What tests that read a W&B run share."""

import struct


def wandb_records(path):
    """Records of an offline run: a LevelDB log (blocks of 32 KiB, 7-byte chunk headers) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full chunk, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record
