"""The process of the fake driver: a supervisor that only greets, on an inherited listening socket.

Run as `python fake_vmm.py LISTENER_FD RUNTIME_DIR BOOT_ID`. It stops itself before it serves, as a VMM's CPUs are
stopped until told to run, and ends with status 0 when asked to shut down.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from microvm_mcp.wire.session import Greeted, GuestSession


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    session = GuestSession()
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        connection, _ = listener.accept()
        # Who gave up while we were stopped has left a hello behind, and nobody to answer to.
        with connection, suppress(ConnectionError):
            while data := connection.recv(65536):
                for event in session.receive(data):
                    if isinstance(event, Greeted):
                        connection.sendall(session.welcome(supervisor="0", boot_id=sys.argv[3], active_jobs=0))


if __name__ == "__main__":
    main()
