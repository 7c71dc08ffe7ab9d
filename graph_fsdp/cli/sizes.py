"""Read sizes on the command line: ``4096``, ``80GB``, ``1.5GiB``."""

from __future__ import annotations

import argparse
import re


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` means. Raises ArgumentTypeError if it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(?:([KMGT])(I?))?B)?", text.strip().upper())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or as 500MB, 2GB, 1GiB")
    return int(float(found[1]) * (2**10 if found[3] else 10**3) ** " KMGT".index(found[2] or " "))
