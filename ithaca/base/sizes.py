"""Sizes as people write them: 64K and 5M tokens are powers of two, 80GB and 1.9TB of bytes are powers of ten."""

import math
import re

from ithaca.base.errors import ConfigError, read_option

LEAST_BYTES = 1e6  # of a memory or a disk; less was meant in another unit
MOST_SECONDS = 30 * 86400  # the longest timeout; torch counts nanoseconds, which would overflow later

_TOKEN_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTE_UNITS = {"": 1} | {
    f"{prefix}{kind}": (1024 if kind == "IB" else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for kind in ("B", "IB")
}


def parse_tokens(text: str | int) -> int:
    """'64K' -> 65536, '1.5M' -> 1572864, 4096 -> 4096."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)", str(text).strip().upper())
    tokens = float(match[1]) * _TOKEN_UNITS[match[2]] if match else 0.0
    if not 1 <= tokens < math.inf or tokens != int(tokens):
        raise ConfigError(f"'{text}' is not a number of tokens: write 4096, 64K or 5M")
    return int(tokens)


def parse_bytes(text: str | int) -> int:
    """'80GB' -> 80 000 000 000, '1.9TB', '64GiB' -> 64 · 2^30, 4096 -> 4096."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?((?:[KMGT]I?B)?)", str(text).strip().upper())
    count = float(match[1]) * _BYTE_UNITS[match[2]] if match else 0.0
    if not 1 <= count < math.inf:
        raise ConfigError(f"'{text}' is not a number of bytes: write 80GB, 1.9TB or 64GiB")
    return int(count)


def read_memory(option: str, text: str) -> int:
    """The bytes that an option gives a memory or a disk, as 80GB. A number without its unit is an error."""
    size = read_option(option, parse_bytes, text)
    if size < LEAST_BYTES:
        raise ConfigError(f"{option} {text} is less than 1MB: give a size with its unit, e.g. {option} 64GB")
    return size


def format_tokens(tokens: int) -> str:
    """65536 -> '64K'; a number that no unit divides is written out."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def format_number(number: float) -> str:
    """Three digits, or all digits of the whole part: `.3g` alone would write 1010 as 1.01e+03."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: '1.5 GiB', '1010 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{format_number(count)} {unit}"
        count /= 1024
    return f"{format_number(count)} TiB"


def spell_bytes(count: int) -> str:
    """Bytes as `parse_bytes` reads them, exactly: 80 000 000 000 -> '80GB', 5 · 10^6 -> '5MB', 2^30 -> '1GiB'."""
    units = sorted(_BYTE_UNITS.items(), key=lambda unit: -unit[1])
    return next(f"{count // size}{name.replace('IB', 'iB')}" for name, size in units if count % size == 0)


def format_seconds(seconds: float) -> str:
    """Seconds in a suitable unit: '90 s', '12.5 min', '3 h', '41 days'."""
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < 2 * length:
            return f"{format_number(seconds)} {unit}"
        seconds /= length
    return f"{format_number(seconds)} days"


def format_clock(seconds: float) -> str:
    """Seconds as a clock shows them: '0:07', '12:30', '1:04:00'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def nearest_divisors(number: int, near: int, most: int = 3) -> str:
    """The divisors of a number that are nearest to another, in words: '1, 2 or 4'."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    divisors = sorted({*small, *(number // size for size in small)}, key=lambda size: abs(size - near))
    *others, last = map(str, sorted(divisors[:most]))
    return f"{', '.join(others)} or {last}" if others else last


def format_count(number: int, what: str) -> str:
    """Return a number of things as '1 sequence', '4 sequences', '2 passes' or '3 files or records'."""
    plural = " or ".join(f"{noun}es" if noun.endswith("s") else f"{noun}s" for noun in what.split(" or "))
    return f"{number:,} {what if number == 1 else plural}"
