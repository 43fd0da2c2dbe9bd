"""The probe thread, and hand-offs under it."""

from time import perf_counter

from stateferry.bench import probe


def test_a_thread_that_keeps_pythons_lock_is_noticed() -> None:
    """The mutant of a ferry: one long call that does not let go. The other thread wakes after it only."""
    with probe.Probe() as watched:
        begin = perf_counter()
        pow(3, 300_000)
        end = perf_counter()
        assert watched.worst_s(begin, end) > 0.5 * (end - begin) - probe.PERIOD_S


def test_hand_offs_run_under_the_probe_and_bring_every_byte() -> None:
    done: list[int] = []
    result = probe.measure("memory", lengths=(256, 1_024), handoffs=2, on_handoff=done.append)
    (short, long) = sorted(result.summary(), key=lambda row: row["tokens"])
    assert (short["tokens"], long["tokens"], short["handoffs"]) == (256, 1_024, 2)
    assert done == [1, 2, 3, 4]
    assert set(long["figures"]) == {f"{w}_p{p}_ms" for w in ("during", "idle") for p in (50, 90, 100)}
    assert all(seconds > 0 for seconds in result.took_s[1_024])
