"""Stand-ins for a bucket of Google Cloud and a container of Azure, beside that of S3.

They answer listings, reads and writes of small objects in the protocol of each cloud, and refuse
requests without the credentials that the environment names.
"""

from __future__ import annotations

import json
from functools import cache
from xml.sax.saxutils import escape

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.s3_bucket import MODIFIED_HTTP, S3Bucket, generation_of


class GoogleBucket(S3Bucket):
    """A bucket in Google's XML protocol, which lists, reads and writes as S3's does."""

    def __init__(self) -> None:
        super().__init__()
        self._application.middlewares.append(_require("Bearer "))

    @property
    def environment(self) -> dict[str, str]:
        """See `S3Bucket`; the address is part of the key, as for emulators."""
        key = {
            "private_key": _private_key(),
            "private_key_id": "1",
            "client_email": "models@example.org",
            "gcs_base_url": self.url,
        }
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}

    def meets_condition(self, request: web.Request, content: bytes | None) -> bool:
        """See `S3Bucket`; the condition is about a number, 0 for no object."""
        expected = request.headers.get("x-goog-if-generation-match")
        return expected in {None, "0" if content is None else generation_of(content)}


class AzureContainer(S3Bucket):
    """A container in the protocol of Azure's blobs.

    Attributes:
        metadata: of the last write, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metadata: dict[str, str] = {}
        self._application.middlewares.append(_require("SharedKey account:"))
        self._application.middlewares.append(self._take_metadata)

    @web.middleware
    async def _take_metadata(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep metadata, whose names have to be identifiers."""
        self.metadata = {
            name.lower().removeprefix("x-ms-meta-"): value
            for name, value in request.headers.items()
            if name.lower().startswith("x-ms-meta-")
        }
        if not all(map(str.isidentifier, self.metadata)):
            text = "<Error><Code>InvalidMetadata</Code></Error>"
            return web.Response(status=400, text=text)
        return await handler(request)

    @property
    def environment(self) -> dict[str, str]:
        """See `S3Bucket`."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
            "AZURE_STORAGE_ENDPOINT": self.url,
            "AZURE_ALLOW_HTTP": "true",
        }

    def list_objects(self, prefix: str) -> web.Response:
        """Answer as List Blobs does."""
        blobs = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties>"
            f"<Last-Modified>{MODIFIED_HTTP}</Last-Modified><Etag>1</Etag>"
            f"<Content-Length>{len(content)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, content in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        listed = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        return web.Response(text=listed, content_type="application/xml")


@cache
def _private_key() -> str:
    """Return a key in PEM; it takes half a second to make."""
    private = generate_private_key(65537, 2048)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _require(authorization: str) -> Middleware:
    """Return a middleware that answers 401 to requests whose credentials do not begin so."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.headers.get("Authorization", "").startswith(authorization):
            return web.Response(status=401)
        return await handler(request)

    return check
