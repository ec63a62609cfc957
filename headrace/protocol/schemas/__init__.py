"""The contract as files, for readers in any language: `python -m headrace.protocol.schemas
[--check]`.

- `types`: one JSON Schema for each type of record value;
- `asyncapi`: the topics, who writes and reads them, and their headers, as AsyncAPI 3;
- `golden`: a record of each kind and of each datatype, as bytes, which never change.

The first two are generated from the Python types whenever these change. A golden sample is
written once; what the code writes later must be the same, and it must still read it.
"""
