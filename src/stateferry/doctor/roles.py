"""Whether two engines play the two parts of a hand-off: one must offer, the other must ask."""

PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


def why_roles_do_not_fit(prefill: str, decode: str) -> str:
    """Why these `kv_role`s cannot hand off; empty where they can, or where one of them is not known.

    `kv_both` does either part.
    """
    if prefill == CONSUMER and decode == PRODUCER:
        return (
            f"roles are the wrong way round: the prefill engine is {prefill!r} and the decode engine is "
            f"{decode!r}. Exchange the two here, or in the router"
        )
    if prefill == CONSUMER:
        side, found, lacks, wanted = "prefill", prefill, "offers nothing", PRODUCER
    elif decode == PRODUCER:
        side, found, lacks, wanted = "decode", decode, "reads no offer", CONSUMER
    else:
        return ""
    who = "both engines have" if prefill == decode else f"the {side} engine has"
    return (
        f"{who} kv_role {found!r}, so the {side} engine {lacks}: start it with `stateferry serve {side}`, or "
        f"with kv_role {wanted!r} (or 'kv_both')"
    )
