"""The transports that may be asked for, as the help of options names them."""

from stateferry.config import TransportName

TRANSPORT_NAMES = ", ".join(name.value for name in TransportName if name is not TransportName.FAULTS)
"""Without `faults`, which is for engines under test and refused without `testing`."""
