"""What the peers' own tools print becomes figures; each text is what that version of the tool printed."""

from __future__ import annotations

import pytest

from benchmarks import single
from benchmarks.children import ToolFailed
from benchmarks.peers import elasticmq, kafka, nats, rabbitmq, redis, rocketmq

PRODUCED = """Reading payloads from: /data/payload
Number of messages read: 1000
240113 records sent, 48022.6 records/sec (46.90 MB/sec), 512.4 ms avg latency, 903.0 ms max latency.
400000 records sent, 95057.0 records/sec (92.83 MB/sec), 800.62 ms avg latency, 1701.00 ms max latency, 755 ms 50th, \
1495 ms 95th, 1590 ms 99th, 1686 ms 99.9th.
"""
CONSUMED = (
    "2026-11-21 15:05:15:534, 2026-11-21 15:05:17:688, 390.6250, 181.3487, 400000, 185701.0214, 524, 1630, 239.6472, "
    "245398.7730\n"
)
END_TO_END = "0\t95.84282300000001\nAvg latency: 2.8787 ms\nPercentiles: 50th = 1, 99th = 22, 99.9th = 95\n"
AT_ONCE = "Avg latency: 0.6312 ms\nPercentiles: 50th = 0, 99th = 5, 99.9th = 10\n"
BATCHES = (
    "15:10:40,341 |-INFO in ...JoranConfiguratorExt@2145b572 - Registering current configuration\n"
    "Current Time: 15:10:50,535 | Send TPS: 301 | Send MPS: 301000 | Max RT(ms): 110 | Average RT(ms): 26.1 |"
    " Average Message RT(ms):   0.026 | Send Failed: 0 | Send Message Failed: 0\n"
    "Current Time: 15:10:51,535 | Send TPS: 384 | Send MPS: 384210 | Max RT(ms): 110 | Average RT(ms): 20.7 |"
    " Average Message RT(ms):   0.021 | Send Failed: 0 | Send Message Failed: 0\n"
)
REFUSED = (
    "Current Time: 2026-11-21 15:10:53,536 | Send TPS: 0 | Send MPS: 0 | Max RT(ms): 0 | Average RT(ms):     NaN |"
    " Average Message RT(ms):     NaN | Send Failed: 9399 | Send Message Failed: 9399000"
)
SINGLES = (
    "Current Time: 2026-11-21 15:13:32,850 | Send TPS: 14409 | Max RT(ms): 565 | Average RT(ms):   4.480 |"
    " Send Failed: 0 | Response Failed: 0"
)
CONSUMER = (
    "Consumer Started.\nCurrent Time: 2026-11-21 14:52:48,531 | Consume TPS: 153397 | AVG(B2C) RT(ms): 12248.994 |"
    " AVG(S2C) RT(ms): 12225.976 | MAX(B2C) RT(ms): 12579 | MAX(S2C) RT(ms): 12574 | Consume Fail: 0"
)
RABBIT = """id: test-150919-933, starting producer #0, channel #0
id: test-150919-933, time 1.000 s, sent: 1001 msg/s, received: 1001 msg/s, min/median/75th/95th/99th consumer latency: \
324/1553/24232/36821/36889 µs
test stopped (Reached time limit)
id: test-150919-933, sending rate avg: 1355 msg/s
id: test-150919-933, receiving rate avg: 1322 msg/s
id: test-150919-933, consumer latency min/median/75th/95th/99th 324/1564/24223/36821/36889 µs
"""
REDIS = (
    '"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms",'
    '"max_latency_ms"\n"XADD bench * body ABC","104712.04","0.269","0.072","0.231","0.543","0.831","2.447"\n'
)
WRK = b"""Running 1s test @ http://127.0.0.1:34145/000000000000/bench
  1 threads and 64 connections
  2312 requests in 1.01s, 1.02MB read
Requests/sec:   2298.20
Transfer/sec:      1.01MB
"""


def test_kafka_producer_tells_the_rate_of_the_whole_run() -> None:
    """The last line counts, not those of intervals before it."""
    assert kafka.produced(PRODUCED) == 95057.0


def test_kafka_consumer_tells_the_rate_without_joining_the_group() -> None:
    """The last column, not the one that counts the rebalance."""
    assert kafka.consumed(CONSUMED) == 245398.773


def test_kafka_latency_tells_quantiles() -> None:
    """p50 and p99, in milliseconds."""
    assert kafka.latency(END_TO_END) == {"p50": 1.0, "p99": 22.0}


def test_kafka_median_below_a_millisecond_is_told_as_its_average() -> None:
    """The tool rounds it to 0, which nothing can be compared with."""
    assert kafka.latency(AT_ONCE) == {"p50": 0.6312, "p99": 5.0}


def test_rocketmq_batches_are_told_in_messages() -> None:
    """MPS of the last line, not TPS, which counts batches."""
    assert rocketmq.rate(BATCHES) == 384210


@pytest.mark.parametrize(("printed", "rate"), [(SINGLES, 14409), (CONSUMER, 153397)])
def test_rocketmq_rates_of_one_message_a_time(printed: str, rate: int) -> None:
    """Of its producer and of its consumer."""
    assert rocketmq.rate(printed) == rate


def test_rocketmq_that_refuses_everything_has_failed() -> None:
    """A rate of 0 with failures is no figure."""
    with pytest.raises(ToolFailed, match="nothing but failures"):
        rocketmq.rate(REFUSED)


def test_rabbitmq_rates_are_averages_of_the_run() -> None:
    """Sent and received."""
    assert rabbitmq.average(rabbitmq.SENT, RABBIT) == 1355
    assert rabbitmq.average(rabbitmq.RECEIVED, RABBIT) == 1322


def test_rabbitmq_latency_is_of_the_whole_run_in_milliseconds() -> None:
    """The last line, in microseconds there."""
    assert rabbitmq.latency(RABBIT) == {"p50": 1.564, "p99": 36.889}


def test_redis_rate_is_the_second_column() -> None:
    """Of the last row; the first has names."""
    assert redis.requests(REDIS) == 104712.04


def test_nats_figures_are_its_last_line() -> None:
    """As JSON, by name."""
    assert nats.figures('warning: x\n{"p50":0.711,"p99":11.876}\n') == {"p50": 0.711, "p99": 11.876}


def test_wrk_tells_requests_a_second() -> None:
    """Also those of ElasticMQ are measured by it."""
    assert single.parsed(WRK) == 2298.20
    assert elasticmq.PEER.key == "elasticmq"


def test_refused_requests_are_no_rate() -> None:
    """A service that answers quickly with errors has not been measured."""
    with pytest.raises(AssertionError, match="7"):
        single.parsed(WRK + b"  Non-2xx or 3xx responses: 7\n")


@pytest.mark.parametrize(
    "read",
    [kafka.produced, kafka.consumed, kafka.latency, rocketmq.rate, rabbitmq.latency, redis.requests, nats.figures],
)
def test_an_unknown_output_is_told(read: object) -> None:
    """With what was printed, so that a new version of a tool is noticed."""
    assert callable(read)
    with pytest.raises(ToolFailed, match="said: what is this"):
        read("what is this")
