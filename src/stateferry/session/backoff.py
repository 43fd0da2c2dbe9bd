"""How long to leave a peer alone that could not be met."""

MAX_EXPONENT = 30


def pause_s(failures: int, first_s: float, longest_s: float, draw: float) -> float:
    """Seconds before the next try after `failures` (1 or more) in a row.

    Doubles from `first_s` up to `longest_s`; `draw`, uniform in [0, 1), takes away up to half, so that
    the ranks and engines that lost a peer together do not come back together.
    """
    whole = min(longest_s, first_s * 2.0 ** min(failures - 1, MAX_EXPONENT))
    return whole * (1.0 - 0.5 * draw)
