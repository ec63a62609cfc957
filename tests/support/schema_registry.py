"""A stand-in for a schema registry, with faults; tests/broker has a real one."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from aiohttp import web

from tests.support.stand_in_server import StandInServer


class StandInRegistry(StandInServer):
    """Answers as Confluent's registry does, as far as Headrace asks.

    Attributes:
        schemas: by id, as `(form, text)`; a test may add some.
        requests: the paths that were asked for, with their methods.
        is_unavailable: answers with status 503 while it is set.
        away_after: it does so after this many requests; None for never.
        holds: requests wait while it is set, until their callers give up.
        refuses: status of refusals to register; 0 for none.
        answers_with: status and body of all responses; None for the registry's own.
        login: name and password that callers must have; empty for none.
    """

    def __init__(self, schemas: dict[int, tuple[str, Any]] | None = None) -> None:
        super().__init__()
        self.schemas = {
            number: (form, json.dumps(schema)) for number, (form, schema) in (schemas or {}).items()
        }
        self.subjects: dict[str, list[int]] = {}
        self.requests: list[str] = []
        self.is_unavailable = False
        self.away_after: int | None = None
        self.holds = False
        self.refuses = 0
        self.answers_with: tuple[int, bytes] | None = None
        self.login: tuple[str, str] | None = None
        router = self._application.router
        router.add_get("/schemas/ids/{id}", self._show)
        router.add_post("/subjects/{subject}/versions", self._register)
        router.add_post("/subjects/{subject}", self._look_up)
        router.add_get("/subjects/{subject}/versions/latest", self._show_latest)

    async def _admit(self, request: web.Request) -> web.Response | None:
        self.requests.append(f"{request.method} {request.path}")
        if self.holds:
            await asyncio.Event().wait()
        if self.answers_with is not None:
            status, body = self.answers_with
            return web.Response(status=status, body=body)
        is_beyond = self.away_after is not None and len(self.requests) > self.away_after
        if self.is_unavailable or is_beyond:
            return web.json_response({"message": "soon"}, status=503)
        if self.login is not None:
            expected = base64.b64encode(":".join(self.login).encode()).decode()
            if request.headers.get("Authorization") != f"Basic {expected}":
                return web.json_response({"error_code": 401, "message": "who?"}, status=401)
        return None

    async def _show(self, request: web.Request) -> web.Response:
        if (refused := await self._admit(request)) is not None:
            return refused
        found = self.schemas.get(int(request.match_info["id"]))
        if found is None:
            return web.json_response({"error_code": 40403, "message": "not found"}, status=404)
        form, text = found
        named = {} if form == "AVRO" else {"schemaType": form}
        return web.json_response({"schema": text, **named})

    async def _register(self, request: web.Request) -> web.Response:
        if (refused := await self._admit(request)) is not None:
            return refused
        if self.refuses:
            found = {"error_code": self.refuses, "message": "incompatible"}
            return web.json_response(found, status=self.refuses)
        body = await request.json()
        schema = (body.get("schemaType", "AVRO"), body["schema"])
        number = next((each for each, known in self.schemas.items() if known == schema), 0)
        if not number:
            number = max(self.schemas, default=0) + 1
            self.schemas[number] = schema
        self.subjects.setdefault(request.match_info["subject"], []).append(number)
        return web.json_response({"id": number})

    async def _show_latest(self, request: web.Request) -> web.Response:
        if (refused := await self._admit(request)) is not None:
            return refused
        numbers = self.subjects.get(request.match_info["subject"])
        if not numbers:
            return web.json_response({"error_code": 40401, "message": "not found"}, status=404)
        return web.json_response({"id": numbers[-1], "schema": self.schemas[numbers[-1]][1]})

    async def _look_up(self, request: web.Request) -> web.Response:
        if (refused := await self._admit(request)) is not None:
            return refused
        body = await request.json()
        schema = (body.get("schemaType", "AVRO"), body["schema"])
        for number in self.subjects.get(request.match_info["subject"], ()):
            if self.schemas[number] == schema:
                return web.json_response({"id": number})
        return web.json_response({"error_code": 40403, "message": "not found"}, status=404)
