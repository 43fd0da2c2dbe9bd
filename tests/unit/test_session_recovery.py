"""What follows from a failed read, and how long a peer is left alone."""

import pytest

from stateferry.session import Next, Recovery, pause_s

GOOD = {"quiet": True, "usable": True, "hopeful": True}


def steps(budget: int, **facts: bool) -> list[Next]:
    """Every decision until it gives up."""
    recovery, made = Recovery(budget), []
    while not made or made[-1] is not Next.GIVE_UP:
        made.append(recovery.after_failure(**{**GOOD, **facts}))
        if made[-1] in (Next.REPOST, Next.RECONNECT):
            recovery.posted()
    assert recovery.retries == len(made) - 1
    return made


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, [Next.GIVE_UP]),
        (1, [Next.RECONNECT, Next.GIVE_UP]),
        (2, [Next.REPOST, Next.RECONNECT, Next.GIVE_UP]),
        (4, [Next.REPOST, Next.REPOST, Next.REPOST, Next.RECONNECT, Next.GIVE_UP]),
    ],
)
def test_the_last_try_and_only_that_goes_over_a_fresh_connection(budget: int, expected: list[Next]) -> None:
    assert steps(budget) == expected


@pytest.mark.parametrize("budget", [1, 2, 10])
def test_a_broken_connection_is_left_at_once_and_only_once(budget: int) -> None:
    assert steps(budget, usable=False) == [Next.RECONNECT, Next.GIVE_UP]


def test_nothing_is_decided_while_a_byte_may_land() -> None:
    recovery = Recovery(2)
    for _ in range(5):
        assert recovery.after_failure(quiet=False, usable=True, hopeful=True) is Next.WAIT
    assert recovery.retries == 0
    assert recovery.after_failure(**GOOD) is Next.REPOST


@pytest.mark.parametrize("quiet", [False, True])
def test_what_cannot_succeed_is_not_tried(quiet: bool) -> None:
    assert Recovery(10).after_failure(quiet=quiet, usable=True, hopeful=False) is Next.GIVE_UP


def test_pauses_double_up_to_their_bound_and_lose_up_to_half_by_chance() -> None:
    assert [pause_s(n, 1.0, 30.0, 0.0) for n in (1, 2, 3, 5, 6, 10**6)] == [1, 2, 4, 16, 30, 30]
    for failures in range(1, 50):
        whole = pause_s(failures, 1.0, 30.0, 0.0)
        drawn = [pause_s(failures, 1.0, 30.0, draw / 10) for draw in range(10)]
        assert all(whole / 2 < pause <= whole for pause in drawn)
        assert len(set(drawn)) == 10
