"""What transfers have in common that write only until they are terminal."""

from stateferry.transport.base import Transfer, TransferState


class SettlingTransfer(Transfer):
    """Pending, then done or failed for ever; quiet as soon as it is one of the two."""

    def __init__(self, total_bytes: int, doing: str) -> None:
        """`doing` begins every error. Nothing to move is done at once."""
        self._doing = doing
        self._total = total_bytes
        self._bytes_done = 0
        self._state = TransferState.PENDING if total_bytes else TransferState.DONE

    @property
    def bytes_done(self) -> int:
        return self._bytes_done

    @property
    def quiet(self) -> bool:
        return self._state is not TransferState.PENDING

    def _fail(self, why: str) -> None:
        self.error = f"{self._doing}: {why}"
        self._state = TransferState.FAILED
