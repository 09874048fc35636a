"""A process that speaks HTTP and decodes images for a service in another process (`testtime.serve.fronts`)."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from testtime.serve import logs
from testtime.serve.app import make_app
from testtime.serve.auth import Gate
from testtime.serve.link import Linked, receive
from testtime.serve.server import configuration, serve_on
from testtime.serve.types import Limits, Settings


@dataclass(frozen=True)
class Address:
    """How a service is reached, and who may use it."""

    folder: str
    host: str
    log_format: str
    certificate: str | None = None
    key: str | None = None


def main(link: socket.socket, listener: socket.socket) -> None:
    """Serve until told to stop; what to serve is the first message."""
    try:
        given, _ = receive(link, bytearray)
    except EOFError:
        return  # the service has ended before
    address, settings = Address(**given["address"]), given["settings"]
    limits = Limits(**settings.pop("limits"))
    logs.set_up(address.log_format)
    service, gate = Linked(link, Settings(limits=limits, **settings)), Gate(Path(address.folder), address.host)
    app = make_app(service, gate, limits, secure=address.certificate is not None)
    serve_on(listener, configuration(app, limits, address.certificate, address.key))


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
