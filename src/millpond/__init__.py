"""Millpond: a multi-tenant message queue with storage separated from compute."""

__version__ = "0.1.0"
