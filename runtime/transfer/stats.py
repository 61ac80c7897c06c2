"""What an engine tells of prompts that another one computes."""

from __future__ import annotations

from paged.runtime.messages import TransferStats
from paged.runtime.transfer.asking import RemotePrefills
from paged.runtime.transfer.serving import ServedPrefills


def transfer_stats(
    remote: RemotePrefills, served: ServedPrefills, bytes_per_page: int
) -> TransferStats:
    """A snapshot of both sides, of which an engine may be either or both."""
    return TransferStats(
        num_connected=remote.num_connected,
        num_under_way=remote.num_under_way,
        num_served=served.num_connected,
        outcomes=dict(remote.outcomes),
        bytes_received=remote.num_pages * bytes_per_page,
        seconds=remote.seconds,
        served=dict(served.outcomes),
        bytes_sent=served.num_pages * bytes_per_page,
    )
