"""Replaying what was recorded: from a topic or a capture file, at a chosen pace, into a topic or
a pipeline.

- `recording`: what all of it reads, an iterable of recorded records; `opening` makes one
- `selection`: which records; `timeline`: partitions merged into one order of time
- `topic_recording`, `capture_recording`: the two kinds of recordings
- `capture`: the capture file's format, written; `capture_reader`: read
- `pacing`: when each record is due, and how well that was kept
- `marking`: what a copy carries that its original does not
- `replay`: the run; `sinks`: where copies go; `checkpoint`, `resume`: how it goes on after an end
"""
