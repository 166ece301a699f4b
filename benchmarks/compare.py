"""A peer beside ours: both run, and take turns at each work (A B A B ..), after a round each that is not counted.

Figures become two lines a work: the peer's, and ours with the peer's as its limit, so that a ratio is of one run. A
limit of the machine that is close to an aim takes turns with the two, and has a third. What cannot be had or done is
told with its reason; the rest goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from benchmarks import harness, peers, relay
from benchmarks.children import Place, ToolFailed, place
from benchmarks.harness import Aim, Line, Setup
from benchmarks.ours import WORKS, Ours
from benchmarks.peers.fetch import CannotBeHad
from benchmarks.peers.peer import Peer, Tell, Work
from benchmarks.report import PeerReport
from millpond.client.connection import Connection
from millpond.core.errors import MillpondError

Run = Callable[[], Awaitable[Mapping[str, float]]]
WARM_SHARE = 0.5  # of a round's seconds: how long the round is that is not counted
OURS = "millpond"

# (work with its figure, who) -> what the ratio of ours to theirs should be
AIMS = {
    ("batched produce, memory", "kafka"): Aim(at_least=4),
    ("batched produce, memory, bodies made", "kafka"): Aim(at_least=4),
    ("batched produce, memory", "rocketmq"): Aim(at_least=2),
    ("batched produce, memory", "confluent-kafka"): Aim(at_least=3),
    ("batched produce, flush", "kafka"): Aim(at_least=3),
    ("batched produce, flush", "rocketmq"): Aim(at_least=3),
    ("single requests, memory", "elasticmq"): Aim(at_least=1.5),
    ("single requests, flush", "kafka"): Aim(at_least=5),
    ("direct read, batches", "kafka"): Aim(at_least=1),
    ("direct read, messages", "confluent-kafka"): Aim(at_least=0.7),
    ("lease + ack", "nats"): Aim(at_least=2),
    ("latency, flush p99", "kafka"): Aim(at_most=1),
}


async def _socket_into_file(setup: Setup) -> Mapping[str, float]:
    return {"": await relay.relay(setup.folder, setup.seconds, setup.message_bytes) * 1e6 / setup.message_bytes}


# (work, who) -> what nothing that takes messages by TCP can pass there: by its name one round of it
LIMITS = {("batched produce, memory", "confluent-kafka"): {relay.BY_CALLS: _socket_into_file}}


async def measure(name: str, setup: Setup, tell: Tell, works: str = "") -> tuple[list[Line], PeerReport]:
    """Every work of that peer whose name has `works` in it."""
    peer = peers.named(name)(setup, tell)
    told = PeerReport(peer.key, peer.title, peer.version, peer.unfair)
    try:
        await peer.fetch()
    except CannotBeHad as error:
        tell(f"cannot be had: {error}")
        return [], msgspec.structs.replace(told, missing=str(error))
    lines: list[Line] = []
    failed: dict[str, str] = {}
    commands: dict[str, str] = {}
    for server in peer.servers:
        try:
            lines += await _beside(peer, server, works, failed, commands)
        except ToolFailed as error:
            failed[server or "server"] = str(error)
            tell(str(error))
    return lines, msgspec.structs.replace(told, failed=failed, commands=commands)


async def _beside(peer: Peer, server: str, works: str, failed: dict[str, str], commands: dict[str, str]) -> list[Line]:
    chosen = [work for work in peer.works(server) if works in work.name]
    if not chosen:
        return []
    setup = peer.setup
    lines: list[Line] = []
    async with (
        harness.service(setup.folder) as service,
        Connection(service.url) as connection,
        place(setup.folder, peer.short()) as here,
    ):
        peer.tell(" ".join(filter(None, ["starting", server])))
        await peer.start(here, server)
        for work in chosen:
            ours = Ours(service.url, connection, setup)
            name = " ".join(filter(None, [work.name, work.who]))
            try:
                lines += await _turns(peer, work, here, ours, service.pid)
            except (ToolFailed, CannotBeHad, MillpondError, AssertionError, TimeoutError) as error:
                failed[name] = f"{type(error).__name__}: {error}"
                peer.tell(f"{name}: {failed[name]}")
            commands[name] = here.commands[-1] if here.commands else ""
        memory = f"memory (RssAnon) after its works, {' '.join(filter(None, [peer.title, server]))}"
        lines.append(Line(memory, "MiB", [here.anonymous_mib()], who=peer.key))
    return lines


async def _turns(peer: Peer, work: Work, here: Place, ours: Ours, pid: int) -> list[Line]:
    compared, setup = WORKS[work.name], peer.setup
    who = work.who or peer.key
    limits = LIMITS.get((work.name, who), {})
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in (OURS, who, *limits)}
    short = msgspec.structs.replace(setup, seconds=max(peer.warm_seconds, setup.seconds * WARM_SHARE))
    for number in range(setup.rounds + 1):
        ours.setup = peer.setup = short if number == 0 else setup
        runs: dict[str, Run] = {OURS: lambda: compared.run(ours), who: work.run}
        runs |= {name: partial(run, ours.setup) for name, run in limits.items()}
        for name, run in runs.items():
            peer.tell(f"{work.name}, {name}, " + (f"round {number} of {setup.rounds}" if number else "warming up"))
            if not await harness.settled(pid, *here.pids()):
                peer.tell(f"not quiet after {harness.SETTLE_SECONDS:.0f} s")
            figures = await run()
            if number:
                found[name].append(figures)
    lines = [line for figure in found[who][0] for line in _pair(work.name, compared.unit, figure, who, found)]
    return lines + [
        Line(f"{name}, beside {who}", compared.unit, [each[""] for each in found[name]], lines[0].name)
        for name in limits
    ]


def _pair(work: str, unit: str, figure: str, who: str, found: Mapping[str, list[Mapping[str, float]]]) -> list[Line]:
    """The peer's line and ours, of one figure of a work."""
    name = " ".join(filter(None, [work, figure]))
    unit = "of one topic's rate" if figure == "share" else unit
    theirs = Line(f"{name}: {who}", unit, [each[figure] for each in found[who]], work=name, who=who)
    values = [each[figure] for each in found[OURS]]
    aim = AIMS.get((name, who))
    return [theirs, Line(f"{name}: {OURS} beside {who}", unit, values, theirs.name, aim=aim, work=name, who=OURS)]
