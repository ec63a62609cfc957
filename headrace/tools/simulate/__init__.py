"""Simulation of batching: recorded arrivals under other limits, rates and numbers of instances.

- `arrivals`: the requests of a recording: times, sizes and batching classes
- `service_times`: S(b), the duration of a batch of b rows: given, learned, or measured
- `events`: the discrete-event simulation of the batcher and its executors
- `scenarios`: what is changed, and the resulting latencies and batches
- `report`: results as a table, and as an HTML page
"""
