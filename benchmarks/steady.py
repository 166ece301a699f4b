"""The slowest messages of a minute: what rounds of a few seconds do not meet.

A probe at a steady rate, with a consumer at the end of the topic, long enough for all that a service does now and
then: checkpoints, sealing, the next segment. How often each came is told, so that a figure without them is not taken
for one with them. Beside it the least that could be done for the same messages (`handover`), as long: pauses of disk
and host are in both.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import filling, handover, harness, probe
from benchmarks.harness import Line, Setup
from benchmarks.probe import Probe
from millpond.client.connection import Connection
from millpond.client.load.figures import Times

MINUTE = 60.0
MESSAGE_BYTES = 4096  # 245 MB a minute: objects of 64 MiB are full, and the segment of 256 MiB is more than half so
MET = {
    "millpond_store_checkpoints_total": "checkpoints",
    "millpond_store_seal_objects_total": "objects sealed",
    "millpond_store_segments": "segments made",
}
QUANTILES = (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms"), ("slowest", "most_ms"))


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Quantiles over a minute each round, whatever a round has elsewhere."""
    bare: list[Times] = []
    found: list[Probe] = []
    met: dict[str, list[float]] = {name: [] for name in MET}
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        for number in range(setup.rounds):
            tell(f"{handover.NAME}, for a minute, round {number + 1} of {setup.rounds}")
            await harness.settled(service.pid)
            bare.append(
                await handover.latency(setup.folder, MESSAGE_BYTES, seconds=MINUTE, per_second=setup.per_second)
            )
            tell(f"steady for a minute, round {number + 1} of {setup.rounds}")
            await harness.settled(service.pid)
            topic = f"steady{number}"
            await filling.create(connection, [topic], setup.queues, "flush")
            before = await _counts(connection)
            found.append(await probe.steady(service.url, topic, MINUTE, setup.per_second, MESSAGE_BYTES, "steady"))
            for name, count in (await _counts(connection)).items():
                met[name].append(count - before[name])
    kinds = {
        "acknowledged": [one.produce for one in found],
        "in a consumer's hand": [one.consume for one in found],
        handover.NAME: bare,
    }
    lines = [
        Line(
            f"steady {quantile}, {what}", "ms", [getattr(one, field) for one in times],
            f"steady {quantile}, {handover.NAME}" if times is not bare else "",
        )
        for what, times in kinds.items()
        for quantile, field in QUANTILES
    ]  # fmt: skip
    return lines + [Line(f"{MET[name]}, a minute of steady", "times", counts) for name, counts in met.items()]


async def _counts(connection: Connection) -> dict[str, float]:
    """What the service says of what it did now and then."""
    answer = await connection.call("GET", "/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in bytes(answer.body).decode().splitlines() if line.startswith("millpond")
    )
    return {name: sum(float(value) for key, value in values.items() if key.partition("{")[0] == name) for name in MET}
