"""Replay of recorded requests: from a topic or a capture file, into a topic or a pipeline.

- `recording`: the interface of recordings, the selection of records, and totals
- `topic_recording`, `capture`: recordings backed by a topic, and by a capture file
- `replay`: the run, which sends records at a pace
- `sinks`: destinations of the copies: a topic, a capture file, a pipeline in this process
- `checkpoint`: files from which an interrupted run is resumed
- `jobs`: what the commands do with a recording: count it, save it, send it
"""
