"""S3 by moto's server: listings in pages, uploads in parts, and the checks of a real one.

What a server does not do on request, such as becoming unavailable, is in `tests.support.s3_bucket`.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.s3_bucket import BUCKET, environment_of
from tests.support.stand_in_server import HOST


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve an empty bucket, `s3://models`; yield the variables with which the library finds it."""
    from moto.server import ThreadedMotoServer  # half a second, in each process that collects tests

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(HOST, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        _request("PUT", f"{url}/{BUCKET}")
        yield environment_of(url)
    finally:
        _request("POST", f"{url}/moto-api/reset")  # its state is that of the process
        server.stop()


def _request(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        answer.read()
