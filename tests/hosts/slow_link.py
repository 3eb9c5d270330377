"""Pass frames between two network interfaces, late and not all: `slow_link.py INSIDE OUTSIDE SECONDS SHARE`.

Frames that come in at INSIDE leave at OUTSIDE after SECONDS, but for a random SHARE of them, which is lost;
the way back is at once and loses nothing. That is what `tc netem` does at a host's own interface, on kernels
built without it.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR = 3, 263, 15  # of linux/if_ether.h, linux/if_packet.h
LARGEST_FRAME = 1 << 17


def frames_of(interface: str) -> socket.socket:
    """Return a socket with all frames of an interface.

    Each frame has the kernel's header about checksums and segments in front (PACKET_VNET_HDR): between
    virtual interfaces neither exists yet, and a frame sent on without the header would be dropped as damaged.
    """
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    packets.bind((interface, 0))
    return packets


def pass_frames(inside: socket.socket, outside: socket.socket, delay_s: float, share_lost: float) -> None:
    """Pass frames both ways until the process ends."""
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    draw = random.Random(0)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([inside, outside], [], [], timeout)[0]:
            frame, (_, _, kind, *_) = source.recvfrom(LARGEST_FRAME)
            if kind == socket.PACKET_OUTGOING:  # sent by this process
                continue
            if source is outside:
                inside.send(frame)
            elif draw.random() >= share_lost:
                waiting.append((time.monotonic() + delay_s, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            outside.send(waiting.popleft()[1])


if __name__ == "__main__":
    pass_frames(frames_of(sys.argv[1]), frames_of(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
