"""For users of vLLM's MoRIIO connector: its settings, its routers' protocol, its registration.

Nothing else in the package knows of it but `vllm/moriio.py`, which puts it in place.
"""

from stateferry.moriio.address import Address, addresses_in, parse_address, request_id
from stateferry.moriio.dialect import MoriioDialect
from stateferry.moriio.registration import Registration, message
from stateferry.moriio.settings import Moriio, read_settings, speaks_moriio

__all__ = [
    "Address",
    "Moriio",
    "MoriioDialect",
    "Registration",
    "addresses_in",
    "message",
    "parse_address",
    "read_settings",
    "request_id",
    "speaks_moriio",
]
