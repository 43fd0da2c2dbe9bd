"""Every error that StateFerry raises.

    StateFerryError
      ConfigError              a setting is unknown, of the wrong type or out of bounds
      LayoutError              a KV cache cannot be described, or a plan cannot be made from it
        LayoutMismatch         two engines' layouts differ; names the field and both values
      ProtocolError            a message or `kv_transfer_params` cannot be understood
      TransportError           moving bytes failed
        TransportUnavailable   the library, device or permission that a transport needs is missing
        TransportClosed        used after close, or the peer's side is gone
        TransportTimeout       a deadline passed
      HandoffError             one hand-off cannot go on
        OfferRefused           the producer does not (or no longer) hold what was asked for
        LeaseLost              the producer's promise to keep the blocks ended before the read did
        DigestMismatch         the bytes that arrived are not the bytes that were computed
      EngineError              an engine or router that we started did not come up, or died
        stack.AnswerError      it answered with an error, or not at all

Exceptions are for the control path. On the data path a poll returns a status.
A message says which request, peer, region or key, what was expected, what was found, what to do.
"""


class StateFerryError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(StateFerryError):
    """A setting is unknown, of the wrong type or out of bounds. The text names the key."""


class LayoutError(StateFerryError):
    """A KV cache cannot be described, or no plan can be made from two descriptions."""


class LayoutMismatch(LayoutError):
    """Two engines' layouts differ in a field that must be equal."""

    def __init__(self, field: str, ours: object, theirs: object, advice: str) -> None:
        super().__init__(
            f"layout field {field!r} differs: this engine has {ours!r}, the peer has {theirs!r}. {advice}"
        )
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ProtocolError(StateFerryError):
    """A message or a `kv_transfer_params` dictionary cannot be understood.

    `field` names what a peer's greeting did not fit in, where it was that.
    """

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class TransportError(StateFerryError):
    """Moving bytes failed."""


class TransportUnavailable(TransportError):
    """The library, device or permission that a transport needs is missing."""


class TransportClosed(TransportError):
    """A transport was used after close, or the peer's side is gone."""


class TransportTimeout(TransportError):
    """A deadline passed."""


class HandoffError(StateFerryError):
    """One hand-off cannot go on. The request is recomputed or failed; the engine lives on."""


class OfferRefused(HandoffError):
    """The producer does not (or no longer) hold what was asked for."""


class LeaseLost(HandoffError):
    """The producer's promise to keep the blocks ended before the read did."""


class DigestMismatch(HandoffError):
    """The bytes that arrived are not the bytes that were computed."""


class EngineError(StateFerryError):
    """An engine or router that was started here did not come up, or died."""
