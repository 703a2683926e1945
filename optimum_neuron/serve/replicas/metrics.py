# SPDX-License-Identifier: Apache-2.0
"""What a front tells Prometheus: the metrics of all replicas, each with its number as a label, and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import httpx2
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .replica import Replica


CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "optimum_neuron:front_"
_LABEL = "replica"
_ANSWER = 5.0  # seconds


class FrontMetrics:
    """The metrics of a front."""

    def __init__(self, replicas: Sequence[Replica], client: httpx2.AsyncClient) -> None:
        self._replicas, self._client = replicas, client
        self._own = CollectorRegistry(auto_describe=False)
        self._retried = Counter(
            PREFIX + "retries", "Requests that were passed to a second replica.", registry=self._own
        )
        self._refused = Counter(
            PREFIX + "request_refused", "Requests that the front itself refused.", ["status"], registry=self._own
        )
        self._own.register(_Replicas(replicas))

    def retried(self) -> None:
        """A request goes to a second replica."""
        self._retried.inc()

    def refused(self, status: int) -> None:
        """A request got no answer of a replica."""
        self._refused.labels(str(status)).inc()

    async def text(self) -> bytes:
        """Prometheus' text format; a replica that does not answer is left out."""
        up = [replica for replica in self._replicas if replica.url is not None]
        texts = await asyncio.gather(*(self._ask(replica) for replica in up))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Merged(zip(up, texts, strict=True)))
        return generate_latest(self._own) + generate_latest(registry)

    async def _ask(self, replica: Replica) -> str:
        try:
            answer = await self._client.get(f"{replica.url}/metrics", timeout=_ANSWER)
        except httpx2.TransportError:
            return ""
        return answer.text if answer.status_code == 200 else ""


class _Replicas(Collector):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(PREFIX + "replica_up", "1 while a replica takes requests.", labels=[_LABEL])
        live = GaugeMetricFamily(PREFIX + "replica_requests", "Requests that a replica has.", labels=[_LABEL])
        again = CounterMetricFamily(PREFIX + "replica_restarts", "Servers after the first.", labels=[_LABEL])
        for replica in self._replicas:
            key = [str(replica.index)]
            up.add_metric(key, float(replica.url is not None))
            live.add_metric(key, replica.live)
            again.add_metric(key, replica.restarts)
        yield from (up, live, again)


class _Merged(Collector):
    """Metrics of several servers as those of one: a name is told once, with the samples of all."""

    def __init__(self, texts: Iterable[tuple[Replica, str]]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, text in texts:
            for family in text_string_to_metric_families(text):
                whole = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, _LABEL: str(replica.index)}
                    whole.samples.append(sample._replace(labels=labels))

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
