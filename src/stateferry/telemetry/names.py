"""Every metric that an engine with StateFerry serves on vLLM's `/metrics`, and every span that it traces.

Same for all transports. `docs/metrics.md` and `docs/tracing.md` are these tables.
"""

import enum
import re
from dataclasses import dataclass


class MetricKind(enum.Enum):
    """How Prometheus keeps it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `label` is what it is split by; every metric also has vLLM's own labels."""

    name: str
    kind: MetricKind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """All values of the label: a metric that never happened is served as 0."""
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name as a query has it; a histogram's ends in `_bucket`, `_sum` or `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


SECONDS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 15.0, 60.0),
)
KINDS = ("attention", "window", "state")
SIDES = ("consumer", "producer")
OTHER_FIELD = "other"
FIELDS = (
    *("protocol", "epoch", "transport"),
    *("facts.model", "facts.model_revision", "facts.architecture", "facts.hf_config", "facts.dtype"),
    *("facts.kv_cache_dtype", "facts.attention_backends", "facts.kv_cache_layout", "facts.dcp"),
    *("facts.device", "facts.speculative", "facts.vllm_version", "facts.stateferry_version"),
    *("facts.prompt_cut", "facts.conv_layout", "facts.mamba_cache_mode", "facts.cpu_packing"),
    *("groups", "kind", "block_tokens", "window_tokens", "scratch_slots", "transfers", "layers", "tensors"),
    *("dtype", "element_bytes", "opaque", "axis", "parts", "unit_bytes", "loops", "block_bytes", "tp_size"),
    OTHER_FIELD,
)
"""In what two engines may not fit. A peer may send any name, so others are counted as one."""

TOLD = "stateferry_told_timestamp_seconds"
OUTCOMES = ("received", "failed", "abandoned")
METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            "stateferry_handoffs",
            MetricKind.COUNTER,
            "Hand-offs that this engine's requests had as a consumer, by how they ended.",
            "outcome",
            OUTCOMES,
        ),
        Metric(
            "stateferry_failures",
            MetricKind.COUNTER,
            "Hand-offs that came to nothing here, by cause: a producer rank that cannot be met (peer) or "
            "says no (refused), a lease that ended, transfer_timeout_s that was over (deadline), a read "
            "that failed every time, bytes that are not those that were computed (digest), blocks that do "
            "not fit (tables), an error of StateFerry itself (defect). vLLM then computes the prompt "
            "here, or fails the request.",
            "cause",
            ("peer", "refused", "lease", "deadline", "read", "digest", "tables", "defect"),
        ),
        Metric(
            "stateferry_refused_offers",
            MetricKind.COUNTER,
            "Requests without a hand-off, though their router asked for one. producer: a prefill that was "
            "not offered. consumer: an offer that is not for this prompt or was used before; its prompt "
            "is computed here.",
            "side",
            SIDES,
        ),
        Metric(
            "stateferry_received_bytes",
            MetricKind.COUNTER,
            "Bytes received over all ranks, by kind of KV-cache group.",
            "kind",
            KINDS,
        ),
        Metric(
            "stateferry_received_pieces",
            MetricKind.COUNTER,
            "Descriptors read over all ranks, after merging, by kind of KV-cache group.",
            "kind",
            KINDS,
        ),
        Metric(
            "stateferry_handoff_seconds",
            MetricKind.HISTOGRAM,
            "From vLLM's load order to the end, the slowest rank's, by how it ended.",
            "outcome",
            OUTCOMES,
            buckets=SECONDS,
        ),
        Metric(
            "stateferry_stage_seconds",
            MetricKind.HISTOGRAM,
            "Parts of a hand-off that was received, each the slowest rank's. wait: from the load order "
            "until its producer is met and earlier device work is done. plan: to lay the plan over the "
            "blocks. post: the call that posts the reads. wire: from that call to the last byte.",
            "stage",
            ("wait", "plan", "post", "wire"),
            SECONDS,
        ),
        Metric(
            "stateferry_retries",
            MetricKind.COUNTER,
            "Reads that failed and were posted again over all ranks, whatever became of them then.",
        ),
        Metric(
            "stateferry_quarantined_transfers",
            MetricKind.GAUGE,
            "Reads past their deadline that may still write, over all ranks, as of the last step. Their "
            "blocks are out of use until they cannot (docs/operations.md).",
        ),
        Metric(
            "stateferry_open_handoffs",
            MetricKind.GAUGE,
            "Hand-offs that are open here. scheduler: requests with an offer, blocks kept for others or "
            "being read into, as vLLM's scheduler sees them. ferry: all ranks' ferries added up, as of "
            "the last step (an idle engine takes none). 0 when nothing is going on.",
            "half",
            ("scheduler", "ferry"),
        ),
        Metric(
            "stateferry_peers",
            MetricKind.GAUGE,
            "Producer ranks that this engine's ranks know, added up, as of the last step. greeting: "
            "asked. ready: hand-offs go; one that dies, is restarted or hangs while nothing is under way is "
            "asked anew, at once, or after half a minute where it hangs or its whole machine is gone. "
            "silent: it was ready and does not answer, though nothing says that it ended; hand-offs from it "
            "fail at once until it answers. failed: left alone for a while. One that nobody needs for ten "
            "minutes, or that failed, is forgotten.",
            "state",
            ("greeting", "ready", "silent", "failed"),
        ),
        Metric(
            TOLD,
            MetricKind.GAUGE,
            "When this engine told its numbers last, as Unix time on its own clock: in each step in which "
            "one changed, and every 5 s while it takes steps. All numbers are as of then. 0: never.",
        ),
        Metric(
            "stateferry_grants",
            MetricKind.COUNTER,
            "Finished prefills whose blocks this engine kept for others, by how that ended, over all ranks.",
            "end",
            ("released", "expired"),
        ),
        Metric(
            "stateferry_renewals",
            MetricKind.COUNTER,
            "Leases that were extended over all ranks. producer: by this engine, for others. consumer: "
            "for this engine's requests.",
            "side",
            SIDES,
        ),
        Metric(
            "stateferry_lease_losses",
            MetricKind.COUNTER,
            "Leases that ended too early over all ranks. producer: blocks taken back from a consumer that "
            "had claimed them and was heard of no more. consumer: hand-offs that failed because their "
            "lease ended.",
            "side",
            SIDES,
        ),
        Metric(
            "stateferry_refusals",
            MetricKind.COUNTER,
            "Hand-shakes that a rank of this engine refused, by the field in which its peer did not fit.",
            "field",
            FIELDS,
        ),
        Metric(
            "stateferry_refused_claims",
            MetricKind.COUNTER,
            "Claims that this engine refused: used twice, expired, changed on their way, or for another "
            "life of it.",
        ),
        Metric(
            "stateferry_refused_peers",
            MetricKind.COUNTER,
            "Connections to control sockets that were turned away: another key or none, or no peer of ours.",
        ),
        Metric(
            "stateferry_refused_messages",
            MetricKind.COUNTER,
            "Control messages that could not be read or answered.",
        ),
    )
}

SPANS: dict[str, str] = {
    "stateferry.offer": "producer, each rank: from the offer until its blocks are free again",
    "stateferry.handoff": "consumer, each rank: from the request's arrival to the end; parent of all below",
    "stateferry.handshake": "until all its producer ranks are met, if one was not already",
    "stateferry.wait": "from vLLM's load order until the plan is begun: hand-shake, and earlier device work",
    "stateferry.plan": "laying the plan over the block ids",
    "stateferry.post": "the call that posts the reads",
    "stateferry.wire": "from that call to the last byte",
    "stateferry.retry": "from a read that is posted again to the next such read, or to the last byte",
    "stateferry.release": "from the last byte to the release: the claim's answer, digests if asked for",
}
"""Name -> what it covers."""

EXEMPLAR_ROOM = 128
"""Characters of all labels of an exemplar together, names and values: OpenMetrics allows no more."""


def exemplar_of(**labels: str) -> dict[str, str]:
    """Labels of an exemplar, the empty ones left out. What does not fit is cut after a word, and marked."""
    found: dict[str, str] = {}
    room = EXEMPLAR_ROOM
    for name, value in labels.items():
        limit = max(0, room - len(name))
        if len(value) > limit:
            begins = value[: max(0, limit - 1)]
            value = f"{begins.rpartition(' ')[0] or begins}…" if begins else ""
        if value:
            found[name] = value
            room -= len(name) + len(value)
    return found


def refusal_label(field: str) -> str:
    """The label's value for a field of a layout, such as `groups[0].block_tokens` or `facts.model`."""
    words = re.sub(r"\[\d+\]", "", field).split(".")
    if words[0] != "facts":
        words = [word for word in words if word != "count"][-1:]
    elif words[1:2] == ["hf_config"]:
        words = words[:2]  # a model's configuration may have any keys
    label = ".".join(words)
    return label if label in FIELDS else OTHER_FIELD
