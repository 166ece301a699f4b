"""The Python SDK of Millpond. Topic and group are all it needs; the service is MILLPOND_URL, or this machine.

>>> async with Producer("orders") as producer:
...     await producer.send(b"one coffee", key="table-7")

>>> async with Consumer("orders", "kitchen") as consumer:
...     async for message in consumer:
...         print(message.body)

`millpond.client.sync` has the same without async. Errors are `MillpondError`s, known by their `code`.
"""

from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.errors import BufferFull, Closed, GatewayProblem, UnknownProblem, Unreachable
from millpond.client.groups import Group, Groups, Lag, QueueLag, QueueSeek
from millpond.client.message import Message
from millpond.client.outbox import Delivery, Sent, SentRange
from millpond.client.producer import Producer
from millpond.client.reader import Page, Reader
from millpond.client.received import MessageBatch, ReceivedMessage
from millpond.client.topics import QueueState, Retention, Topic, Topics
from millpond.core.errors import MillpondError

__all__ = [
    "BufferFull",
    "Closed",
    "Connection",
    "Consumer",
    "Delivery",
    "GatewayProblem",
    "Group",
    "Groups",
    "Lag",
    "Message",
    "MessageBatch",
    "MillpondError",
    "Page",
    "Producer",
    "QueueLag",
    "QueueSeek",
    "QueueState",
    "Reader",
    "ReceivedMessage",
    "Retention",
    "Sent",
    "SentRange",
    "Topic",
    "Topics",
    "UnknownProblem",
    "Unreachable",
]
