"""The known GPU that is nearest to an unknown one, by name, family or memory. It is suggested, never taken."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from ithaca.base.errors import suggestion

# GPUs that the table lacks -> those of the same generation or memory
_FAMILY = {
    "H100-80GB": "H800 H100NVL H20 H800NVL",
    "H200-141GB": "H200NVL",
    "GH200-96GB": "GRACEHOPPER",
    "B200-180GB": "B100 B300 GB200 GB300",
    "A100-80GB": "A800 A30X",
    "A100-40GB": "A30 PG506",
    "L40S-48GB": "L40 L20 A40 A6000 RTXA6000 RTX6000 RTX6000ADA RTXPRO6000 A16",
    "RTX4090-24GB": "4080 4070 3090 3090TI 3080 5090 5080 RTX3090 RTX3090TI RTX3080 RTX4080 RTX5090 RTX5080 "
    "RTX4090D A10 A10G A10M L4 A5000 RTXA5000 A4500 A4000 RTX5000ADA A2",
}
# GPUs whose compute capability is below 8.0, with it
_OLD = {
    "A100-40GB": "V100=7.0 P100=6.0 P40=6.1 TITANV=7.0 RTX8000=7.5 QUADRORTX8000=7.5 GV100=7.0",
    "RTX4090-24GB": "T4=7.5 K80=3.7 M60=5.2 P4=6.1 2080=7.5 2080TI=7.5 RTX2080=7.5 RTX2080TI=7.5 1080TI=6.1",
}
# Devices of other makers, with their memory in GB
_FOREIGN = (
    "MI100=32 MI210=64 MI250=128 MI250X=128 MI300=192 MI300X=192 MI300A=128 MI325X=256 MI350X=288 MI355X=288 "
    "RX7900XTX=24 7900XTX=24 GAUDI=32 GAUDI2=96 GAUDI3=128 MAX1550=128 TPU=16 TPUV4=32 TPUV5E=16 TPUV5P=95 TPUV6E=32 "
    "TRAINIUM=32 TRN1=32 TRN2=96 M1=16 M2=24 M3=24 M4=24 ARC=16"
)
_WORDS = re.compile(r"NVIDIA|GEFORCE|TESLA|QUADRO|AMD|INSTINCT|INTEL|GOOGLE|APPLE|SXM\d?|PCIE|HBM\d?E?|[\s_/-]")
_MEMORY = re.compile(r"(\d+)\s*GI?B?\b", re.IGNORECASE)
_OTHER_ORDER = (r"(?P<name>.+?)\s*[x×:*]\s*(?P<count>\d+)", r"(?P<count>\d+)\s*[*:]?\s*(?P<name>\D.*)")


def suggest_gpu(name: str, count: int, known: Mapping[str, float]) -> str:
    """Return the end of a sentence about an unknown GPU, with a value that works; `known`: bytes by name."""
    wanted, memory = _normal(name), _memory(name)
    old = {key: (like, capability) for like, names in _OLD.items() for key, capability in _pairs(names)}
    foreign = dict(_pairs(_FOREIGN))
    if wanted in old:
        like, capability = old[wanted]
        return f"its compute capability is {capability}, and 8.0 is needed: {count}x{like} works"
    if wanted in foreign:
        near = _nearest(memory or float(foreign[wanted]), list(known), known)
        return f"it is not an NVIDIA GPU, and Ithaca runs only on these; the nearest in memory is {count}x{near}"
    if like := _same_name(wanted, memory, known):
        return f"did you mean '{like}'?"
    if like := next((like for like, names in _FAMILY.items() if wanted in map(_normal, names.split())), None):
        return f"the nearest known GPU is {count}x{like}; to plan for your own GPU, describe it in a file (--hardware)"
    for pattern in _OTHER_ORDER:
        found = re.fullmatch(pattern, name.strip(), re.IGNORECASE)
        if found and (like := _same_name(_normal(found["name"]), _memory(found["name"]), known)):
            return f"did you mean '{found['count']}x{like}'?"
    return _mistyped(name, wanted, memory, known, count)


def _mistyped(name: str, wanted: str, memory: float | None, known: Mapping[str, float], count: int) -> str:
    stems = {_normal(other): other for other in known}
    near = get_close_matches(wanted, stems, n=1)
    alike = [other for other in known if near and _normal(other) == near[0]]
    if alike:
        best = _nearest(memory, alike, known) if memory else alike[0]
        return f"did you mean '{best}'?"
    if memory:
        return f"the nearest in memory is {count}x{_nearest(memory, list(known), known)}"
    return suggestion(name, known)


def _same_name(wanted: str, memory: float | None, known: Mapping[str, float]) -> str | None:
    """Return the known GPU of this name, with or without RTX; the memory decides among several."""
    same = [other for other in known if _normal(other).removeprefix("RTX") == wanted.removeprefix("RTX")]
    return _nearest(memory, same, known) if same else None


def _nearest(memory: float | None, names: list[str], known: Mapping[str, float]) -> str:
    """Return the GPU with the nearest memory, in GB as names have it; of two the larger."""
    sizes = {name: _memory(name) or known[name] / 1e9 for name in names}
    return min(names, key=lambda name: (abs(sizes[name] - (memory or 0)), -sizes[name]))


def _normal(name: str) -> str:
    """Return a name without maker, form, memory and spaces: 'H100' of 'NVIDIA H100 80GB HBM3'."""
    return _WORDS.sub("", _MEMORY.sub("", name.upper()))


def _memory(name: str) -> float | None:
    found = _MEMORY.search(name)
    return float(found[1]) if found else None


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (item.partition("=") for item in text.split())]
