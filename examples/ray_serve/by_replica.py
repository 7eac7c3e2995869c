"""What each replica has drafted and what was accepted, from Ray's metrics.

Ray gathers the metrics of all processes of a node and serves them in Prometheus'
format, with a label for the replica of Ray Serve. Names lose their colon and begin
with ``ray_``: `configs/grafana/README.md` says how Prometheus turns them back.
"""

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from vllm_mtp.tools.server_process import http_get

REPLICA = "ReplicaId"
_COUNTS = {
    "ray_vllm_mtp_draft_tokens_total": "num_draft_tokens",
    "ray_vllm_mtp_accepted_tokens_total": "num_accepted_tokens",
    "ray_vllm_mtp_decode_tokens_total": "num_decode_tokens",
    "ray_vllm_mtp_request_steps_total": "num_request_steps",
}


@dataclass
class Counts:
    """Of one replica, since it has started."""

    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    num_decode_tokens: float = 0.0
    num_request_steps: float = 0.0

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that the target accepted; NaN without any."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Committed in a pass of the target, for each request; NaN without any."""
        steps = self.num_request_steps
        return _ratio(steps + self.num_accepted_tokens, steps)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def counts_by_replica(text: str) -> dict[str, Counts]:
    """Counts of each replica, from the metrics of a node."""
    found: dict[str, Counts] = defaultdict(Counts)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            field = _COUNTS.get(sample.name)
            replica = sample.labels.get(REPLICA)
            if field is not None and replica:
                counts = found[replica]
                setattr(counts, field, getattr(counts, field) + sample.value)
    return dict(found)


def read_counts() -> dict[str, Counts]:
    """Of all nodes of the cluster that this process is connected to.

    Raises:
        OSError: A node does not answer.
    """
    import ray

    found: dict[str, Counts] = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            address, port = node["NodeManagerAddress"], node["MetricsExportPort"]
            found |= counts_by_replica(http_get(f"http://{address}:{port}/metrics"))
    return found
