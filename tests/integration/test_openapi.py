"""The interface keeps what its OpenAPI document says: schemathesis makes requests from it, good ones and bad ones.

No answer is a 500, every status and content type is documented, every JSON answer fits its schema, and requests that
break the document are refused. The everyday run makes some requests for each call; the long one (`make test-all`) many.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.processes import Process, standalone

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NAMES = {"topic": "orders", "target": "orders", "group": "g", "queue": 0, "id": "a-1-0", "producer": "p", "replay": "r"}
EVERYDAY_EXAMPLES = 12
LONG_EXAMPLES = 400
NEVER = {
    "create_key",  # the first one would end the open mode, and with it the test of all others
    "delete_topic",  # of the topic that the others are about
}
MAKES = {"put_group": "group"}  # a name of its own: the one that is there has other settings
QUERIES = {  # what takes more than a schema says, such as exactly one of three
    "read": {"offset": 0},
    "find_by_key": {"key": "k"},
}
NEVER_SERVED = {"DELETE /v1/tenant/keys/{key_id}"}  # there is no key


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Process]:
    """A standalone with something of every kind in it."""
    process = standalone(tmp_path)
    session = {"id": "p", "queue": 0, "first": 0, "last": 0}
    try:
        asyncio.run(process.start())
        call(process, "PUT", "/v1/topics/orders", {"queues": 2})
        message = {"body": "a", "key": "k", "tag": "t", "queue": 0}
        call(process, "POST", "/v1/topics/orders/messages", {"messages": [message]})
        call(process, "POST", "/v1/topics/orders/messages", {"messages": [{"body": "b"}], "producer": session})
        call(process, "PUT", "/v1/topics/orders/groups/g", {"start": "earliest"})
        call(process, "PUT", "/v1/replays/r", {"topic": "orders", "target": "orders"})
        yield process
    finally:
        process.close()


def call(process: Process, method: str, path: str, body: Any) -> None:
    asked = urllib.request.Request(process.url + path, json.dumps(body).encode(), method=method)  # noqa: S310
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked) as answer:  # noqa: S310 - our own service
        assert answer.status in {200, 201}


class Run:
    """Requests of one call. Every other one names what is there, so that more than refusals is seen."""

    def __init__(self, operation: Any, mode: GenerationMode, examples: int) -> None:
        self._operation, self._mode, self._examples = operation, mode, examples
        self.name: str = operation.definition.raw["operationId"]
        self.statuses: Counter[int] = Counter()

    def go(self) -> None:
        """Raises what schemathesis found; Unsatisfiable when no request of this mode can be made."""
        bounds = settings(
            max_examples=self._examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        bounds(given(case=self._operation.as_strategy(generation_mode=self._mode))(self._one))()

    def _one(self, case: Any) -> None:
        if self.statuses.total() % 8 != 7:
            case.headers.pop("Authorization", None)  # no key exists: any that is shown is a wrong one
        if self.statuses.total() % 4 == 0 and self.name in QUERIES:
            case.query = dict(QUERIES[self.name])
        for part in (case.path_parameters, case.body, case.query):
            if not isinstance(part, dict):
                continue
            if self.statuses.total() % 2 == 0:
                part.update({name: NAMES[name] for name in part if name in NAMES and name != MAKES.get(self.name)})
            if isinstance(part.get("wait_ms"), int):
                part["wait_ms"] = min(part["wait_ms"], 1)  # as good as any, and nobody has to wait
        response = case.call_and_validate(checks=CHECKS, timeout=30)
        self.statuses[response.status_code] += 1


def told(error: BaseException) -> str:
    """What schemathesis says, also when it says several things."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(told(one) for one in error.exceptions)
    return f"{error}"


def all_conform(url: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig())
    failed: list[str] = []
    seen: dict[str, Counter[int]] = {}
    operations = [one.ok() for one in schema.get_all_operations()]
    for operation in sorted(operations, key=lambda one: one.method.upper() == "DELETE"):
        if operation.definition.raw["operationId"] in NEVER:
            continue
        seen[operation.label] = Counter()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            run = Run(operation, mode, examples)
            try:
                run.go()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE, f"{operation.label}: the document allows no request at all"
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - all that is wrong is told at once
                failed.append(f"{operation.label}: {told(error)}")
            seen[operation.label] += run.statuses
    assert not failed, "\n\n".join(failed)
    served = {label for label, statuses in seen.items() if any(200 <= status < 300 for status in statuses)}
    assert len(seen) >= 25
    assert {label: dict(seen[label]) for label in seen.keys() - served - NEVER_SERVED} == {}


def test_the_interface_keeps_its_word(service: Process) -> None:
    """Some requests for each call of the document; each call is served at least once."""
    all_conform(service.url, EVERYDAY_EXAMPLES)
    assert service.running


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_the_interface_keeps_its_word_at_length(service: Process) -> None:
    """Many requests for each call of the document."""
    all_conform(service.url, LONG_EXAMPLES)
    assert service.running
