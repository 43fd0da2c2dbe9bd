"""How an offer is written into `kv_transfer_params` and read from them: ours, and room for another's."""

from collections.abc import Mapping
from typing import Any, Protocol

from stateferry.ids import TransferId
from stateferry.wire.params import Offer, offer_to_params, parse_offer
from stateferry.wire.promise import Promise, parse_promise, promised_to


class Dialect(Protocol):
    """One way to say it. Both engines and the router between them must speak the same."""

    def write(self, offer: Offer, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a prefill leg's response carries; `asked` is what the router sent with that leg."""
        ...

    def refuse(self, reason: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What it carries when there is no offer."""
        ...

    def read(self, params: Mapping[str, Any], request_id: str) -> Offer:
        """The offer in a decode leg's dictionary. Anybody may have written it, and the request's id, too.

        Raises ProtocolError and nothing else.
        """
        ...

    def promised_to(self, asked: Mapping[str, Any]) -> TransferId | None:
        """The id that a prefill leg's offer must have, where its router sends both legs at once."""
        ...

    def promise(self, params: Mapping[str, Any]) -> Promise | None:
        """What a decode leg that was sent before its offer waits for; None: it has its offer.

        Raises ProtocolError and nothing else.
        """
        ...


class OwnDialect:
    """Everything of ours under one key; the router carries the dictionary unchanged."""

    def write(self, offer: Offer, asked: Mapping[str, Any]) -> dict[str, Any]:
        """See Dialect."""
        return offer_to_params(offer)

    def refuse(self, reason: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """See Dialect."""
        return {
            "do_remote_prefill": False,
            "do_remote_decode": False,
            "stateferry": {"not_offered": reason},
        }

    def read(self, params: Mapping[str, Any], request_id: str) -> Offer:
        """See Dialect."""
        return parse_offer(params)

    def promised_to(self, asked: Mapping[str, Any]) -> TransferId | None:
        """See Dialect."""
        return promised_to(asked)

    def promise(self, params: Mapping[str, Any]) -> Promise | None:
        """See Dialect."""
        return parse_promise(params)
