"""What a run leaves behind, and pictures of it."""

from penstock.report.record import Record

__all__ = ["Record"]
