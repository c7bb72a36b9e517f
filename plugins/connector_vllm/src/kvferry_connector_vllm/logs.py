"""kvferry's log lines in vLLM's log."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def follow_vllm(packages: Iterable[str]) -> None:
    """Let the loggers of these top-level packages write where vLLM's do, with time, level and process.

    Without it Python drops their INFO lines and prints the others bare. Whoever configured logging, the root
    logger's or one of these, keeps what was configured. Nothing changes where vLLM has no handler.
    """
    vllm = logging.getLogger("vllm")
    if not vllm.handlers:
        return
    for package in packages:
        logger = logging.getLogger(package)
        if logger.hasHandlers():
            continue
        for handler in vllm.handlers:
            logger.addHandler(handler)
        logger.setLevel(vllm.level)
        logger.propagate = False
