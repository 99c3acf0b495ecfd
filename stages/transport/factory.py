"""Builds a rank's transport and token handler for the transport that was chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stages.cuda import CudaStream
from stages.device import Stream
from stages.errors import TransportError
from stages.plan import TensorSchema
from stages.pp_handler import PPHandler
from stages.topology import PPGroup
from stages.transport.base import PPTransport
from stages.transport.choice import check_transport_name
from stages.transport.copy_engine import CopyEngineTransport
from stages.transport.copy_engine_tokens import CopyEngineTokenReceiver, CopyEngineTokenSender
from stages.transport.device_links import DeviceLinks
from stages.transport.host_ring import HostLink, HostRingTransport
from stages.transport.host_tokens import HostTokenReceiver, HostTokenSender
from stages.transport.links import RankLinks, check_boundary
from stages.transport.process_group import ProcessGroupTransport
from stages.transport.process_group_host import GlooLink
from stages.transport.process_group_links import ProcessGroupLinks
from stages.transport.process_group_tokens import NcclTokenReceiver, NcclTokenSender

Links = RankLinks | DeviceLinks | ProcessGroupLinks
LINKS_OF: dict[str, type[Links]] = {
    "shared_memory": RankLinks,
    "memory": RankLinks,
    "copy_engine": DeviceLinks,
    "nccl": ProcessGroupLinks,
    "gloo": ProcessGroupLinks,
}
"""The kind of links that each transport needs."""


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """One rank's side of an epoch's transport.

    ``name`` is what ``choose_transport`` chose. ``boundary`` lists the intermediate tensors, of up to ``max_rows`` rows a
    step. ``compute`` is the stream that forwards run on. Sends have streams of their own, unless ``sends_on_compute``: then a
    forward that finds no free slot waits for one; the copy engine still sends large messages beside the forward. ``links`` are
    the rank's links, connected, of the kind that the transport needs, and None without PP; transport and handler take them
    over.
    """

    name: str
    pp_group: PPGroup
    boundary: Sequence[TensorSchema]
    max_rows: int
    ring_slots: int
    compute: Stream
    sends_on_compute: bool = False
    links: Links | None = None

    @property
    def send_stream(self) -> Stream | None:
        return self.compute if self.sends_on_compute else None


def create_pp_transport(config: TransportConfig, persistent: Mapping[str, torch.Tensor] | None = None) -> PPTransport | None:
    """The rank's transport; None without PP. Called by every rank with the same epoch; it sends nothing itself.

    ``persistent`` are the static input tensors of a rank that is not the first, ``[>= max_rows, width]`` by name, or None.
    """
    if config.pp_group.world_size == 1:
        return None
    check_boundary(config.boundary)
    links = _checked_links(config)
    if isinstance(links, DeviceLinks):
        return CopyEngineTransport(
            pp_group=config.pp_group,
            boundary=config.boundary,
            max_rows=config.max_rows,
            compute=_on_gpu(config.compute),
            links=links,
            sends_on_compute=config.sends_on_compute,
            persistent=persistent,
        )
    if isinstance(links, ProcessGroupLinks):
        return ProcessGroupTransport(
            pp_group=config.pp_group,
            boundary=config.boundary,
            max_rows=config.max_rows,
            compute=config.compute,
            links=links,
            send_stream=config.send_stream,
            persistent=persistent,
        )
    for link in (links.from_prev, links.to_next):
        if link is not None and link.layout.num_slots != config.ring_slots:
            raise TransportError(f"ring slots {config.ring_slots}: the links were made with {link.layout.num_slots}")
    return HostRingTransport(
        name=config.name,
        pp_group=config.pp_group,
        boundary=config.boundary,
        max_rows=config.max_rows,
        compute=config.compute,
        links=links,
        send_stream=config.send_stream,
        persistent=persistent,
    )


def create_pp_handler(config: TransportConfig) -> PPHandler | None:
    """The rank's token handler; None without PP."""
    if config.pp_group.world_size == 1:
        return None
    links, group, is_sender = _checked_links(config), config.pp_group, config.pp_group.is_last_rank
    if isinstance(links, DeviceLinks):
        if is_sender:
            return CopyEngineTokenSender(group, _on_gpu(config.compute), links)
        return CopyEngineTokenReceiver(group, links)
    if isinstance(links, ProcessGroupLinks) and links.gpu is not None:
        return (NcclTokenSender if is_sender else NcclTokenReceiver)(group, _on_gpu(config.compute), links)
    tokens: Sequence[HostLink] = (
        links.tokens if isinstance(links, RankLinks) else [GlooLink(links, link) for link in links.tokens]
    )
    if is_sender:
        return HostTokenSender(group, config.compute, tokens, config.send_stream)
    return HostTokenReceiver(group, tokens[0])


def _checked_links(config: TransportConfig) -> Links:
    check_transport_name(config.name)
    kind = LINKS_OF.get(config.name)
    if kind is None:
        raise TransportError(f"transport {config.name}: must be one of {', '.join(LINKS_OF)}")
    if not isinstance(config.links, kind):
        raise TransportError(f"transport {config.name}: rank {config.pp_group.rank} was given no links")
    return config.links


def _on_gpu(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TransportError(f"stream {stream.name} is not of a GPU, as the links are")
    return stream
