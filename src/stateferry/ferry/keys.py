"""The file that holds the one secret of all engines that may talk to each other.

    # comments
    stateferry-key-1 64 hexadecimal digits

The digits are a Curve25519 secret key; every engine uses it and its public half on both ends of a control
connection, and accepts nobody who has another.
"""

import ipaddress
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from stateferry.config import Auth, Config
from stateferry.errors import ConfigError

FORMAT = "stateferry-key-1"
MAX_FILE_BYTES = 4096
_LINE = re.compile(rf"{FORMAT} ([0-9a-f]{{64}})")
_HEAD = "# The secret that StateFerry engines know each other by (auth_key_file). Keep it to them.\n"


@dataclass(frozen=True, slots=True)
class ControlKey:
    """Both halves, as ZeroMQ wants them. The secret one is in no text that this value gives."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public half as a handshake shows it: 32 bytes."""
        return z85.decode(self.public)


def write_key(path: Path) -> None:
    """Make a new key file that only its owner can read. Raises ConfigError if there is a file already."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as e:
        raise ConfigError(
            f"{path} is there already and is not overwritten: engines may be using it. Choose another name"
        ) from e
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from e
    with os.fdopen(file, "w") as out:
        os.fchmod(out.fileno(), 0o600)  # whatever the umask took away
        out.write(f"{_HEAD}{FORMAT} {secrets.token_hex(32)}\n")


def read_key(path: str) -> ControlKey:
    """Read a key file. Raises ConfigError for one that is missing, open to others, or no key."""
    advice = "`stateferry key FILE` makes one; every engine needs a copy of the same file"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as e:
        raise ConfigError(f"auth_key_file {path!r} cannot be read: {e.strerror}. {advice}") from e
    if not stat.S_ISREG(mode):
        raise ConfigError(f"auth_key_file {path!r} is not a file. {advice}")
    # Read by the group is how a container that is not root gets a secret.
    if mode & 0o037:
        raise ConfigError(
            f"auth_key_file {path!r} has mode {stat.S_IMODE(mode):04o}: others than its owner and group "
            f"can use it. chmod 600 {path}"
        )
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    found = _LINE.fullmatch(keys[0]) if len(keys) == 1 and len(content) <= MAX_FILE_BYTES else None
    if found is None:
        raise ConfigError(
            f"auth_key_file {path!r} holds no key: expected one line, {FORMAT!r} and 64 hexadecimal digits, "
            f"found {len(keys)} line(s), {len(content)} bytes. {advice}"
        )
    secret = z85.encode(bytes.fromhex(found.group(1)))
    return ControlKey(zmq.curve_public(secret), secret)


def control_key(config: Config, bind_host: str) -> ControlKey | None:
    """The key for an engine's control sockets; None: it goes without.

    Raises ConfigError where an address that other machines can reach would be open to everybody.
    """
    if config.auth is Auth.NONE:
        if config.auth_key_file:
            raise ConfigError("auth is 'none', but auth_key_file is set: remove one of the two")
        return None
    if config.auth_key_file:
        if not zmq.has("curve"):
            raise ConfigError(
                "auth_key_file is set, but this libzmq was built without CURVE: install pyzmq's wheel"
            )
        return read_key(config.auth_key_file)
    if is_loopback(bind_host):
        return None
    raise ConfigError(
        f"control sockets would listen on {bind_host!r}, which other machines may reach, and would answer "
        "everybody. Make a key (`stateferry key FILE`), copy it to every engine and set 'auth_key_file' in "
        "kv_connector_extra_config; or set 'host' to a loopback address; or, where nobody else can reach "
        "that network, set 'auth' to 'none'"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address. A name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def numeric(host: str) -> str:
    """An address that peers dial without looking a name up. Raises ConfigError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise ConfigError(
            f"host {host!r} has no address: {e}. Set 'host' in kv_connector_extra_config"
        ) from e
    return str(found[0][4][0])
