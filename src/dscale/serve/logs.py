"""Logs as one JSON object a line on stderr. No prompt or answer is in them unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("dscale.serve")


class JsonLines(logging.Formatter):
    """time, level, event, what the call gave as extra={"fields": {...}}, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().rstrip(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False, default=str)


def start_logs() -> None:
    """Send the server's and uvicorn's logs, Python's warnings and what other packages log to stderr as JSON lines."""
    logging.captureWarnings(True)
    warnings.formatwarning = one_line
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("", logging.WARNING), ("dscale", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as one line; a formatter for the module warnings."""
    return f"{category.__name__}: {message}\n"


def tell(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields."""
    log.log(level, event, extra={"fields": fields})
