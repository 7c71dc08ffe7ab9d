"""A plugin of pytest: each test's wall time and its worker's CPU time, a line of JSON each; see ``suite_time.py``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    wall, cpu = time.monotonic(), time.process_time()
    yield
    line = [item.nodeid.partition("::")[0], time.monotonic() - wall, time.process_time() - cpu]
    with open(os.path.join(os.environ["GRAPH_FSDP_SUITE_TIME"], f"{os.getpid()}.walls"), "a") as file:
        file.write(json.dumps(line) + "\n")
