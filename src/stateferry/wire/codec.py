"""Bytes to messages and back, with bounds. A bad message is an error value, never a dead thread."""

from collections.abc import Sequence

import msgspec

from stateferry.errors import ProtocolError
from stateferry.wire.messages import Message

MAX_MESSAGE_BYTES = 16 << 20
"""Larger frames are dropped unread. A layout of 100 layers is about 100 KiB."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


def decode_frames(frames: Sequence[bytes]) -> Message:
    """Read one message of a socket that keeps frames together: exactly one frame. Raises ProtocolError."""
    if len(frames) != 1:
        raise ProtocolError(f"message of {len(frames)} frames; every message has one")
    return decode_message(frames[0])


def decode_message(frame: bytes) -> Message:
    """Read one frame. Raises ProtocolError for anything that is not exactly one known message."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as e:
        # DecodeError also covers ValidationError; a deeply nested frame ends in RecursionError.
        raise ProtocolError(f"message of {len(frame)} bytes cannot be read: {e}") from e
