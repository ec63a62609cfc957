"""Replay of recordings: from a topic or a capture file, at a chosen pace, into a topic or a
pipeline.

- `recording`: the common interface, an iterable of recorded records; `opening` makes one
- `selection`: which records; `timeline`: partitions merged into one order of time
- `topic_recording`, `capture_recording`: the two kinds of recordings
- `capture`: the capture file's format and writer; `capture_reader`: its reader
- `pacing`: due times of records, and how precisely they were kept
- `marking`: differences between a copy and its original
- `replay`: the run; `sinks`: destinations of copies; `checkpoint`, `resume`: resuming a run
"""
