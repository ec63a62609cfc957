"""The contract as files for any language: `python -m headrace.protocol.schemas [--check]`.

- `types`: one JSON Schema for each type of record value;
- `asyncapi`: the topics, their writers, readers and headers, as AsyncAPI 3;
- `golden`: a record of each kind and of each datatype, as bytes, which never change.

The first two are generated from the Python types whenever those change. A golden sample is written
once; later releases must write the same bytes, and still read them.
"""
