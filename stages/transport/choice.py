"""Which transport an epoch uses: a pure function of everybody's offers, so that every rank chooses the same. No torch."""

import difflib
from collections.abc import Sequence

from stages.errors import ConfigError, CopyEngineUnavailable, TransportUnavailable
from stages.plan import Offer

AUTO = "auto"
NONE = "none"  # what is chosen without pipeline parallelism
PREFERRED = ("copy_engine", "nccl", "shared_memory", "gloo")
"""What ``auto`` tries, best first."""
TRANSPORTS = (*PREFERRED, "memory")
"""Everything that can be asked for by name, besides ``auto``."""
_ONE_HOST = frozenset({"copy_engine", "shared_memory", "memory"})


def check_transport_name(wanted: str) -> None:
    """Raise ``ConfigError`` unless ``wanted`` is ``auto`` or a transport's name."""
    names = (AUTO, *TRANSPORTS)
    if wanted not in names:
        close = difflib.get_close_matches(wanted, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(names)}"
        raise ConfigError(f"--pp-transport {wanted}: unknown transport; {hint}")


def choose_transport(offers: Sequence[Offer], wanted: str) -> tuple[str, str]:
    """The transport of an epoch and the reason, from the offers in rank order; ``none`` for a single rank.

    Under ``auto`` the reason names, for every better transport, the rank that cannot do it and why. Raises
    ``TransportUnavailable`` (``CopyEngineUnavailable`` for ``copy_engine``) when what is wanted is impossible, and
    ``ConfigError`` for an unknown name.
    """
    check_transport_name(wanted)
    if len(offers) == 1:
        return NONE, "one rank needs no transport"
    if wanted != AUTO:
        if obstacle := _obstacle(offers, wanted):
            unavailable = CopyEngineUnavailable if wanted == "copy_engine" else TransportUnavailable
            raise unavailable(f"--pp-transport {wanted}: {obstacle}")
        return wanted, "asked for"
    skipped: list[str] = []
    for name in PREFERRED:
        obstacle = _obstacle(offers, name)
        if not obstacle:
            return name, "; ".join(["the best that every rank offers", *skipped])
        skipped.append(f"not {name}: {obstacle}")
    raise TransportUnavailable("--pp-transport auto: no transport fits every rank; " + "; ".join(skipped))


def _obstacle(offers: Sequence[Offer], name: str) -> str:
    """The first rank that keeps ``name`` from being used, and why; empty when all can."""
    for rank, offer in enumerate(offers):
        if reason := offer.transports.get(name, "does not offer it"):
            return f"rank {rank}: {reason}"
    for rank, offer in enumerate(offers):
        if name in _ONE_HOST and offer.host_id != offers[0].host_id:
            return f"rank {rank}: is on another host than rank 0"
        if name == "memory" and offer.process_id != offers[0].process_id:
            return f"rank {rank}: is in another process than rank 0"
    return _gpu_obstacle(offers, name)


def _gpu_obstacle(offers: Sequence[Offer], name: str) -> str:
    """The first two ranks whose GPUs cannot do ``name`` with each other: the copy engine needs NVLink between the GPUs of ranks
    that exchange messages, or one GPU; NCCL refuses two ranks on one GPU."""
    last = len(offers) - 1
    if name == "copy_engine":
        for rank, peer in sorted({(sender, receiver) for sender in range(last) for receiver in (sender + 1, last)}):
            a, b = offers[rank], offers[peer]
            if a.device_uuid != b.device_uuid and (b.device_uuid not in a.nvlink_peers or a.device_uuid not in b.nvlink_peers):
                return f"rank {rank}: no NVLink between its GPU {a.device_uuid} and rank {peer}'s {b.device_uuid}"
    if name == "nccl":
        owners: dict[str, int] = {}
        for rank, offer in enumerate(offers):
            if (owner := owners.setdefault(offer.device_uuid, rank)) != rank:
                return f"rank {rank}: shares GPU {offer.device_uuid} with rank {owner}"
    return ""
