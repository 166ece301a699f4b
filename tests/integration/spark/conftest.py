"""A standalone service as its own process, and one Spark for all tests here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millpond.spark.session import session


class Service:
    """`millpond standalone`: `url`; `kill` and `start` again on the same port and data."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = 0
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "millpond", "standalone", "--data", str(self._data), "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # this program
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                self.url = line.split()[1]
                self._port = int(self.url.rpartition(":")[2])
                return
        raise AssertionError("standalone did not start")

    def kill(self) -> None:
        """As the kernel would: no word to it."""
        assert self._process is not None
        self._process.kill()
        self._end()

    def close(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path / "data")
    running.start()
    yield running
    running.close()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = session("millpond tests", master="local[2]", config={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
