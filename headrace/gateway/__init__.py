"""The gateway: front doors to the models for clients that do not speak Kafka.

A gateway is a client of the log, `headrace.client.Client`, behind a server of the Open Inference
Protocol. It keeps nothing between requests, so any number of gateways may run. `gateway.py` has
what the doors share, `doors.py` how they open and drain, `http.py` the door for HTTP with a
request's whole way through it, and `codec.py` the protocol's bodies; `grpc_door.py`,
`grpc_inference.py`, `grpc_codec.py` and `open_inference.proto` are the same for gRPC. docs/http.md
and docs/grpc.md are the pages for callers.
"""

from headrace.gateway.doors import open_gateway

__all__ = ["open_gateway"]
