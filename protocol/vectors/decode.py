#!/usr/bin/env python3
"""Decodes the test vectors as SPEC.md says: no code of Twinrail's, nothing beyond the standard library.

Exit code 0 when every vector is as it says, 1 when one isn't, 2 when the files can't be read.
"""

import json
import pathlib
import struct
import sys
import unicodedata

HEADER_LEN, MAX_HANDSHAKE_PAYLOAD, MAX_CONTROL_PAYLOAD, MAX_TRANSFER = 64, 18432, 512, 16 << 20
MAX_NAME, MAX_VOLUME_NAME, MAX_TEXT, MAX_PORTALS, MAX_DEPTH, MAX_EXTENTS = 223, 64, 480, 8, 256, 256
MAX_SPACE_RANGE, MAX_VERIFY_RANGE = 1 << 30, 64 << 20
PAYLOAD_FOLLOWS, FUA, NO_UNMAP = 1, 2, 4

STATUS = {
    "ok": 0, "unknown_opcode": 0x101, "bad_flags": 0x102, "misaligned": 0x103, "out_of_range": 0x104,
    "too_large": 0x105, "zero_length": 0x106, "bad_payload_length": 0x107, "read_only": 0x108,
    "payload_crc": 0x109, "bad_parameter": 0x30b, "bad_magic": 0x401, "header_crc": 0x403,
    "malformed": 0x404, "unexpected_frame": 0x405,
}
CONTROL = {0x10: "probe", 0x11: "probe_reply", 0x12: "event", 0x13: "event_seen",
           0x14: "close", 0x15: "closed", 0x16: "disconnect", 0x17: "path_lost"}
RESIZED, DRAINING, CREDIT = 1, 2, 3
RAIL_TCP = 1
READ, WRITE, FLUSH, WRITE_ZEROES, DISCARD, COMPARE_AND_WRITE, BLOCK_STATUS, VERIFY, IDENTIFY = range(1, 10)


class Fault(Exception):
    """The bytes end the connection, or the command is refused, with this status."""


def need(condition, status="malformed"):
    if not condition:
        raise Fault(status)


def crc_table():
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)  # 0x1EDC6F41, reflected
        yield n


CRC_TABLE = tuple(crc_table())


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def printable(data):
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Fault("malformed") from None
    need(not any(unicodedata.category(c) == "Cc" for c in text))
    return text


class Fields:
    """Takes fields from the front of a payload."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def bytes(self, count):
        need(self.at + count <= len(self.data))
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, size):
        return int.from_bytes(self.bytes(size), "little")

    def id(self):
        return self.bytes(16).hex()

    def text(self, most):
        length = self.number(2)
        need(length <= most)
        return printable(self.bytes(length))

    def zeros(self, count):
        need(not any(self.bytes(count)))

    def end(self):
        need(self.at == len(self.data))


def hello(data):
    magic, low, high, features, length, name_crc, crc = struct.unpack("<8sHH4xQ28xIII", data[:HEADER_LEN])
    need(magic == b"TWINRAIL", "bad_magic")
    need(crc32c(data[:60]) == crc, "header_crc")
    need(1 <= length <= MAX_NAME and low <= high)
    name = data[HEADER_LEN:]
    need(len(name) == length)
    need(crc32c(name) == name_crc, "header_crc")
    return {"frame": "hello", "version_min": low, "version_max": high, "features": features, "name": printable(name)}


def header(data):
    """Any header but HELLO's: its kind, and its fields."""
    kind, code, flags, slot, word, epoch, sequence, body, length, payload_crc, crc = struct.unpack(
        "<BBHHHQQ28sIII", data)
    need(crc32c(data[:60]) == crc, "header_crc")
    follows = flags & PAYLOAD_FOLLOWS
    need(not (follows and length == 0))
    need(length or payload_crc == 0)
    handshake = 0x41 <= kind <= 0x49
    most = MAX_TRANSFER if 1 <= kind <= 4 else MAX_HANDSHAKE_PAYLOAD if handshake else MAX_CONTROL_PAYLOAD
    need(length <= most)
    payload = {"payload_length": length, "payload_crc": payload_crc}
    place = {"slot": slot, "epoch": epoch, "sequence": sequence}
    if kind == 1:
        offset, span, address, key = struct.unpack("<QQQI", body)
        return kind, {"frame": "command", "opcode": code, "flags": flags, "grant_seen": word, **place,
                      "offset": offset, "length": span, "address": address, "key": key, **payload}
    if kind == 2:
        need(flags & ~PAYLOAD_FOLLOWS == 0)
        result, granted, number, window, tail = struct.unpack("<QHHI12s", body)
        need(granted >= 1 and not any(tail))
        return kind, {"frame": "reply", "opcode": code, "flags": flags, "status": word, **place, "result": result,
                      "granted_slots": granted, "grant_number": number, "data_window": window, **payload}
    if kind in (3, 4):
        need(flags == (PAYLOAD_FOLLOWS if kind == 4 else 0) and word == 0 and not any(body))
        return kind, {"frame": "data" if kind == 4 else "fetch", "opcode": code, **place, **payload}
    if handshake:
        need(flags == PAYLOAD_FOLLOWS and (code, slot, word, epoch, sequence) == (0, 0, 0, 0, 0) and not any(body))
        return kind, payload
    need(kind in CONTROL, "unexpected_frame")
    name = CONTROL[kind]
    token, granted, number, window, value, tail = struct.unpack("<QHHIQI", body)
    need((slot, sequence, tail) == (0, 0, 0) and flags == (PAYLOAD_FOLLOWS if length else 0))
    need(name in ("event", "event_seen") or code == 0)
    need(name == "event" or value == 0)
    need(name not in ("disconnect", "path_lost") or token == 0)
    if name == "event" and code == CREDIT:
        need(granted >= 1)
    elif name == "event_seen" and code == CREDIT:
        need((granted, window) == (0, 0))
    elif name != "event" or code in (RESIZED, DRAINING):
        need((granted, number, window) == (0, 0, 0))
    need(name in ("closed", "disconnect") or word == 0)
    need(length <= (MAX_TEXT if name == "disconnect" else 0))
    return kind, {"frame": name, "code": code, "status": word, "epoch": epoch, "token": token,
                  "granted_slots": granted, "grant_number": number, "data_window": window, "value": value, **payload}


def following(fields):
    """How many bytes come behind the header on the same connection."""
    if fields["frame"] in ("command", "reply"):
        return fields["payload_length"] if fields["flags"] & PAYLOAD_FOLLOWS else 0
    return 0 if fields["frame"] == "fetch" else fields["payload_length"]


def active(data):
    kind, fields = header(data[:HEADER_LEN])
    need(kind < 0x41, "unexpected_frame")
    payload = data[HEADER_LEN:]
    need(len(payload) == following(fields))
    if not payload:
        return fields
    if kind in CONTROL:
        need(crc32c(payload) == fields["payload_crc"], "header_crc")
        return {**fields, "payload": printable(payload)}
    fields["payload"] = payload.hex()
    need(crc32c(payload) == fields["payload_crc"], "payload_crc")
    if kind == 2 and fields["status"] == 0 and fields["opcode"] == BLOCK_STATUS:
        fields["extents"] = extents(payload, 1 << 64)
    if kind == 2 and fields["status"] == 0 and fields["opcode"] == IDENTIFY:
        fields["identity"] = attached(Fields(payload))
    return fields


def placed(command):
    return command["address"] != 0 or command["key"] != 0


def tcp(data):
    """A frame of an active connection on TCP, where nothing is reached by remote access."""
    fields = active(data)
    need(fields["frame"] != "command" or not placed(fields))
    return fields


def extents(payload, asked):
    f, found = Fields(payload), []
    while f.at < len(payload):
        found.append({"length": f.number(8), "flags": f.number(4)})
        f.zeros(4)
        need(found[-1]["length"] > 0)
    need(1 <= len(found) <= MAX_EXTENTS and sum(e["length"] for e in found) <= asked)
    return found


def welcome(f):
    return {"frame": "welcome", "version": f.number(2), "auth_method": f.number(2), "features": f.number(8),
            "boot_id": f.id(), "target_name": f.text(MAX_NAME)}


def auth(f):
    return {"frame": "auth", "method": f.number(2), "round": f.number(2), "data": f.bytes(len(f.data) - f.at).hex()}


def attach(f):
    fields = {"frame": "attach", "session": f.id(), "secret": f.id(), "next_secret": f.id(),
              "expected_volume": f.id(), "generation": f.number(8), "mode": f.number(1), "attach_flags": f.number(1),
              "queues": f.number(2), "volume_name": f.text(MAX_VOLUME_NAME)}
    need(fields["session"] != "00" * 16 and fields["attach_flags"] & ~3 == 0)
    return fields


def attached(f):
    fields = {"frame": "attached", "volume": f.id(), "generation": f.number(8), "size": f.number(8),
              "failed_syncs": f.number(8), "logical_block": f.number(4), "physical_block": f.number(4),
              "max_transfer": f.number(4), "volume_flags": f.number(4), "lease_ms": f.number(4),
              "queues": f.number(2)}
    count = f.number(2)
    need(count <= MAX_PORTALS)
    fields["synced_boot_id"] = f.id()
    fields["portals"] = [{"family": f.number(2), "port": f.number(2), "address": f.id()} for _ in range(count)]
    f.end()
    return fields


def activate(f):
    fields = {"frame": "activate", "session": f.id(), "secret": f.id(), "epoch": f.number(8),
              "instance": f.number(8), "in_capsule": f.number(4), "queue": f.number(2), "depth": f.number(2),
              "rail": f.number(1)}
    f.zeros(1)
    count = f.number(2)
    need(count <= MAX_DEPTH)
    entries = f.bytes(count * HEADER_LEN)
    f.end()
    fields["report"] = [inner(entries[at:at + HEADER_LEN], "command") for at in range(0, len(entries), HEADER_LEN)]
    need(fields["rail"] != RAIL_TCP or not any(placed(command) for command in fields["report"]))
    return fields


def activated(f):
    fields = {"frame": "activated", "epoch": f.number(8), "instance": f.number(8), "in_capsule": f.number(4),
              "data_window": f.number(4), "depth": f.number(2), "granted_slots": f.number(2)}
    count = f.number(2)
    fields["grant_number"] = f.number(2)
    need(count <= MAX_DEPTH and 1 <= fields["granted_slots"] <= fields["depth"] <= MAX_DEPTH)
    fields["verdicts"] = [verdict(f) for _ in range(count)]
    return fields


def verdict(f):
    fields = {"slot": f.number(2), "verdict": f.number(1)}
    need(fields["verdict"] <= 2)
    f.zeros(1)
    if fields["verdict"] == 2:
        reply = fields["reply"] = inner(f.bytes(HEADER_LEN), "reply")
        need(reply["slot"] == fields["slot"] and reply["payload_length"] == 0)
    return fields


def inner(data, frame):
    """A header inside a payload."""
    fields = header(data)[1]
    need(fields.get("frame") == frame)
    return fields


def refused(f):
    fields = {"frame": "refused", "status": f.number(2), "version_min": f.number(2), "version_max": f.number(2)}
    f.zeros(2)
    return {**fields, "retry_after_ms": f.number(4), "text": f.text(MAX_TEXT)}


def standby(f):
    fields = {"frame": "standby", "session": f.id(), "secret": f.id(), "queue": f.number(2), "rail": f.number(1)}
    f.zeros(5)
    return fields


def standing(f):
    fields = {"frame": "standing", "epoch": f.number(8), "instance": f.number(8)}
    need((fields["epoch"] == 0) == (fields["instance"] == 0))
    return fields


HANDSHAKE = {0x41: welcome, 0x42: auth, 0x43: attach, 0x44: attached, 0x45: activate, 0x46: activated, 0x47: refused,
             0x48: standby, 0x49: standing}


def handshake(data):
    kind, fields = header(data[:HEADER_LEN])
    need(kind in HANDSHAKE, "unexpected_frame")
    payload = data[HEADER_LEN:]
    need(len(payload) == fields["payload_length"])
    need(crc32c(payload) == fields["payload_crc"], "header_crc")
    f = Fields(payload)
    decoded = HANDSHAKE[kind](f)
    f.end()
    return decoded


def check_request(data, volume, read_only):
    """What a target looks at before it executes a command (SPEC.md, 'Checks')."""
    kind, c = header(data[:HEADER_LEN])
    need(kind == 1)
    opcode, flags, offset, length = c["opcode"], c["flags"] & ~PAYLOAD_FOLLOWS, c["offset"], c["length"]
    need(READ <= opcode <= IDENTIFY, "unknown_opcode")
    changes = opcode in (WRITE, WRITE_ZEROES, DISCARD, COMPARE_AND_WRITE)
    allowed = (FUA if changes else 0) | (NO_UNMAP if opcode == WRITE_ZEROES else 0)
    need(flags & ~allowed == 0, "bad_flags")
    need(not (read_only and changes), "read_only")
    if opcode in (FLUSH, IDENTIFY):
        need(offset == 0 and length == 0, "bad_parameter")
    else:
        most = {READ: volume["max_transfer"], WRITE: volume["max_transfer"], VERIFY: MAX_VERIFY_RANGE,
                COMPARE_AND_WRITE: volume["max_transfer"] // 2}.get(opcode, MAX_SPACE_RANGE)
        need(length != 0, "zero_length")
        need(offset % volume["logical_block"] == 0 and length % volume["logical_block"] == 0, "misaligned")
        need(length <= most, "too_large")
        need(offset + length <= volume["size"], "out_of_range")
    brings = {WRITE: length, COMPARE_AND_WRITE: 2 * length}.get(opcode, 0)
    need(c["payload_length"] == brings, "bad_payload_length")
    need(crc32c(data[HEADER_LEN:]) == c["payload_crc"], "payload_crc")


LAYERS = {"hello": hello, "handshake": handshake, "active": active, "tcp": tcp}


def decode(vector):
    data = bytes.fromhex(vector["hex"])
    if vector["layer"] == "extents":
        return extents(data, vector["asked"])
    return LAYERS[vector["layer"]](data)


def outcome(attempt, *arguments):
    """A name for how it went, and the fields if there are any."""
    try:
        return "ok", attempt(*arguments)
    except Fault as fault:
        return str(fault), None


def main():
    here = pathlib.Path(__file__).resolve().parent
    try:
        files = {name: json.loads((here / f"{name}.json").read_text(encoding="utf-8"))
                 for name in ("frames", "malformed", "requests")}
    except (OSError, ValueError) as error:
        print(f"vectors: the files can't be read: {error}", file=sys.stderr)
        return 2
    if crc32c(b"123456789") != 0xE3069283:
        print("vectors: this decoder's CRC32C is wrong", file=sys.stderr)
        return 2
    passed = failed = 0
    for name, content in files.items():
        for vector in content["vectors"]:
            if name == "requests":
                got, fields = outcome(check_request, bytes.fromhex(vector["hex"]), content["geometry"],
                                      vector["read_only"])
            else:
                got, fields = outcome(decode, vector)
            want = vector.get("status_name", "ok")
            right = got == want and STATUS[got] == vector.get("status", 0)
            if right and fields != vector.get("fields", fields):
                right, got = False, f"other fields:\n  found    {fields}\n  expected {vector['fields']}"
            if right:
                passed += 1
            else:
                failed += 1
                print(f"{name}.json: {vector['name']}: expected {want}, found {got}", file=sys.stderr)
    if passed == 0:
        failed += 1
        print("vectors: the files hold none", file=sys.stderr)
    print(f"vectors: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
