"""`session(...)`: a SparkSession as Millpond needs it.

    UTC everywhere; no guessing of partition column types (`date=` stays text); the Python that runs now also runs
    the tasks; no web page, no progress bars, errors only in the log; a Java found or borrowed (`java`); and, for a
    tier on S3, S3A by 35 small jars instead of the 686 MB bundle.

All of it must be set before the JVM starts, hence a helper. A session made elsewhere works too, as far as its
settings allow: `history` says what is missing.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from millpond.core.errors import StartupError
from millpond.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REMEDY = "pip install 'millpond[spark]'"
AWS_SDK_VERSION = "2.35.4"  # what Hadoop 3.5.0 was built with
S3A_EXCLUDES = (
    "software.amazon.awssdk:bundle,io.netty:*,org.slf4j:*,org.apache.httpcomponents:*,commons-logging:*,"
    "commons-codec:*,org.wildfly.openssl:*"
)
_LOG4J = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
PANDAS_WARNING = "PySpark does not yet fully support pandas"  # nothing here hands it any
BASE_CONFIG = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkMissing(StartupError):
    """PySpark is not installed, or not as it comes from PyPI."""


def require_pyspark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("this needs PySpark 4.2 or newer", REMEDY)


def session(
    name: str = "millpond",
    *,
    master: str = "local[*]",
    tier: str | None = None,
    s3_endpoint: str | None = None,
    s3_region: str = "us-east-1",
    s3_access_key: str | None = None,
    s3_secret_key: str | None = None,
    packages: bool = False,
    ui: bool = False,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A new SparkSession, or the one there is (whose JVM keeps the settings it has).

    `tier`: where the tier is (`s3://bucket/prefix` turns S3A on; keys default to the usual AWS chain).
    `packages`: let Spark fetch the S3A jars from Maven; else they must already be on its class path.
    `config`: further Spark settings, which win. Raises SparkMissing, JavaNotFound.
    """
    require_pyspark()
    from pyspark.sql import SparkSession

    if is_running():
        return SparkSession.builder.getOrCreate()
    settings = dict(BASE_CONFIG)
    settings["spark.ui.enabled"] = "true" if ui else "false"
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if tier is not None and urlsplit(tier).scheme in {"s3", "s3a"}:
        settings |= s3a_config(
            urlsplit(tier).netloc, s3_endpoint, s3_region, s3_access_key, s3_secret_key, packages=packages
        )
    directory = _own_directory()
    settings |= _file_settings(directory)
    settings |= config or {}
    builder = SparkSession.builder.master(master).appName(name)
    for setting, value in settings.items():
        builder = builder.config(setting, value)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    with _environment(_jvm_environment(directory)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", PANDAS_WARNING, FutureWarning)
        return builder.getOrCreate()


def is_running() -> bool:
    """Whether this process has a Spark already, whoever made it."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def s3a_config(
    bucket: str,
    endpoint: str | None = None,
    region: str = "us-east-1",
    access_key: str | None = None,
    secret_key: str | None = None,
    *,
    packages: bool = False,
) -> dict[str, str]:
    """Spark settings that let S3A read `bucket`.

    `classic` input: the default stream caches up to 2 GiB whatever the heap is. The low retry and timeout numbers
    make a dead server an error within seconds instead of minutes.
    """
    of_bucket = f"spark.hadoop.fs.s3a.bucket.{bucket}."
    settings = {
        "spark.hadoop.fs.s3a.input.stream.type": "classic",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.attempts.maximum": "2",
        "spark.hadoop.fs.s3a.retry.limit": "3",
        "spark.hadoop.fs.s3a.connection.establish.timeout": "5s",
        of_bucket + "endpoint.region": region,
    }
    if endpoint:
        settings[of_bucket + "endpoint"] = endpoint
        settings[of_bucket + "connection.ssl.enabled"] = "false" if endpoint.startswith("http://") else "true"
    if access_key and secret_key:
        settings[of_bucket + "access.key"] = access_key
        settings[of_bucket + "secret.key"] = secret_key
        settings[of_bucket + "aws.credentials.provider"] = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
    if packages:
        settings["spark.jars.packages"] = s3a_packages(hadoop_version())
        settings["spark.jars.excludes"] = S3A_EXCLUDES
    return settings


def s3a_packages(hadoop: str) -> str:
    """Maven coordinates of S3A for a Hadoop version, without the SDK bundle."""
    sdk = "software.amazon.awssdk"
    return (
        f"org.apache.hadoop:hadoop-aws:{hadoop},{sdk}:s3:{AWS_SDK_VERSION},{sdk}:s3-transfer-manager:{AWS_SDK_VERSION}"
    )


def hadoop_version() -> str:
    """The version of Hadoop inside the PySpark in use, read off its jars."""
    import pyspark

    jars = sorted((Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar"))
    if not jars:
        raise SparkMissing("this PySpark carries no Hadoop client", REMEDY)
    return jars[-1].stem.removeprefix("hadoop-client-api-")


def _file_settings(directory: Path) -> dict[str, str]:
    """Write the files that settings point to."""
    log4j = directory / "log4j2.properties"
    log4j.write_text(_LOG4J)
    return {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        "spark.sql.warehouse.dir": (directory / "warehouse").as_uri(),
    }


def _jvm_environment(directory: Path) -> dict[str, str]:
    """What the JVM must find in its environment when it starts."""
    return {
        "JAVA_HOME": str(java_home(directory)),
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """`changes` in the environment of this process, for as long as it takes to start the JVM."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_directory() -> Path:
    """A private directory of this process, removed at its end."""
    directory = tempfile.mkdtemp(prefix="millpond-spark-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)
