"""Quix Streams as in its documentation: a dataframe over one topic, into another.

Its `apply` takes one message at a time; it has no way to run a model on several. Offsets are
committed every five seconds, its default.
"""

from __future__ import annotations

from quixstreams import Application

from benchmarks.loops.served import Model, arguments


def main() -> None:
    given = arguments()
    model = Model(given.model, given.threads)
    app = Application(
        broker_address=given.bootstrap_servers,
        consumer_group=given.group,
        auto_offset_reset="earliest",
        auto_create_topics=False,
        loglevel="WARNING",
    )
    requests = app.topic(given.requests, value_deserializer="bytes")
    responses = app.topic(given.responses, value_serializer="bytes")
    frame = app.dataframe(requests)
    frame = frame.apply(lambda value: model.answer([value])[0])
    frame.to_topic(responses)
    app.run()


if __name__ == "__main__":
    main()
