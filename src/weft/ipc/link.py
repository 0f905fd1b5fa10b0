"""Settings of the TCP sockets between fronts and gates."""

from typing import Any

import zmq

HEARTBEAT_MILLISECONDS, HEARTBEAT_TIMEOUT_MILLISECONDS = 500, 2000  # zmq's own: a lost connection is closed by both sides


def configure_link(socket: zmq.Socket[Any]) -> None:
    """Set a socket so that no send blocks, and a connection that is lost is closed soon."""
    socket.set_hwm(0)  # what is under way is bounded by the requests admitted, and ends with the connection
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
