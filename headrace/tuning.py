"""Tuning values: times, sizes and counts that are chosen, not promised.

They are not settings: the defaults suit every deployment that was measured. They stand here so that
they can be read in one place, and so that a test passes other values to the object that it tests.
Each class belongs to one package, and is passed to the constructors of that package's objects.
Limits of a protocol or of a file format are not tuning values; they stay beside the code.
"""

from __future__ import annotations

from msgspec import Struct

from headrace.primitives.backoff import Backoff


class ConsumerTuning(Struct, frozen=True):
    """Tuning values of `headrace.consumer`."""

    throughput_rise: float = 0.5
    """Share of the difference by which a higher rate raises the learned throughput."""
    throughput_fall: float = 0.1
    """Share of the difference by which a lower rate with work left lowers it."""

    reader_stall_s: float = 60.0
    """The reader is stuck after this long within one poll, a rebalance included."""
    poll_timeout_s: float = 0.2
    """Longest wait of one poll. Polls are not cancelled, so it also delays the end of reading."""
    paused_poll_timeout_s: float = 0.01
    """The same while a partition is paused, so that it is resumed soon after it may be."""
    max_poll_records: int = 512
    """Most records of one poll, and of one chunk that waits for the first stage."""
    retry_first_s: float = 0.1
    """First pause after the log was unavailable; later ones double."""
    retry_max_s: float = 1.0
    """Longest pause after the log was unavailable."""
    close_timeout_s: float = 2.0
    """Limit of waiting for the current poll when the source closes."""
    revocation_timeout_s: float = 25.0
    """Limit of draining and the last commit together: a group waits 30 s for a revocation."""
    last_commit_timeout_s: float = 2.0
    """Part of the revocation time reserved for the last commit."""

    far_ahead_bytes: int = 16 * 1024 * 1024
    """With more bytes waiting for the first stage, reading pauses between polls."""
    far_ahead_pause_s: float = 0.02
    """Pause between polls while more than `far_ahead_bytes` wait."""
    turns_to_answer: int = 10
    """Event-loop turns from a poll until the answers to its records are sent, if the stages have
    nothing else to do: each stage passes its chunk on to the next one's turn."""
    large_chunk_bytes: int = 128 * 1024
    """With this many bytes waiting, chunks are large enough: do not wait for more records."""

    max_unanswered_records: int = 16_384
    """Most records of a partition passed on to another process and not yet answered there."""
    other_progress_interval_s: float = 0.2
    """Interval of queries for the commits of another process that answers."""
    stalled_check_interval_s: float = 30.0
    """Interval of the checks for bases that do not move."""
    throughput_interval_s: float = 1.0
    """Interval of the samples of throughput and of the time without an answer."""
    end_offsets_interval_s: float = 5.0
    """Interval of queries for the end offsets, which the lag needs."""

    max_deferred_records: int = 256
    """Most deferred records of a partition, which is then paused. So few unanswered offsets fit
    into the commit metadata, however far reading goes on."""
    resume_deferred_records: int = 192
    """A partition paused for `max_deferred_records` is resumed below this number."""
    deferral_grace_s: float = 0.25
    """A share at its limit may wait this long for room before a request of it is deferred."""
    saturated_s: float = 60.0
    """A share whose last deferral is no older than this gets no such wait: it would not help."""
    refusal_interval_s: float = 1.0
    """Interval of the searches for deferred requests that would be late."""
    deadline_prune_at: int = 1024
    """Noted deadlines at which those of requests that no longer wait are dropped."""
    overdue_fraction: float = 1 / 8
    """Part of the budget that overdue requests without room may take at a time."""
    room_check_interval_s: float = 0.02
    """Interval of the checks for room for deferred records."""
    reread_timeout_s: float = 2.0
    """Limit of reading the picked records of a partition again; unread ones wait on."""
    reread_idle_s: float = 5.0
    """The second reader stays open this long after the last deferred record."""
    reread_near_offsets: int = 64
    """A record at most this far ahead is reached by reading on instead of seeking."""

    search_interval_s: float = 0.1
    """Interval at which the poison search forgets answered offsets."""
    marked_records: int = 64
    """Records read under one crash marker: after an unclean end, each of them must run alone."""
    closing_marker_timeout_s: float = 1.0
    """Limit of the marker at a revocation; without it, the next owner sees an unclean end."""


class DeliveryTuning(Struct, frozen=True):
    """Tuning values of `headrace.delivery` and `headrace.crash_isolation`."""

    commit_interval_s: float = 0.05
    """Pause between commits: acknowledgements of this time are committed together."""
    transactional_commit_interval_s: float = 1.0
    """The same with transactions: answers carry their own commits, and the rest is not urgent."""
    commit_refresh_interval_s: float = 3600.0
    """Unchanged offsets are committed again this often: a broker expires a group's commits on a
    topic to which no member of the group subscribes."""
    encoding_share: float = 1 / 20
    """Part of the event loop's time that encoding answered ranges may take."""
    metadata_characters: int = 4096
    """Most characters of a commit's metadata: a broker's default `offset.metadata.max.bytes`."""
    safe_span_offsets: int = 16_384
    """Any answered ranges within this span fit as a bitmap, with a poll or two to spare."""
    safe_unanswered_offsets: int = 400
    """With at most this many unanswered offsets, the few ranges between them fit as run lengths."""

    retry_first_s: float = 0.1
    """First pause after the log was unavailable; later ones double."""
    retry_max_s: float = 1.0
    """Longest pause after the log was unavailable."""
    send_retry_first_s: float = 0.1
    """First pause after records were not acknowledged; later ones double."""
    send_retry_max_s: float = 5.0
    """Longest pause after records were not acknowledged."""
    producer_close_timeout_s: float = 2.0
    """Limit of closing transactional producers at a revocation."""
    max_shared_part_bytes: int = 1024 * 1024
    """Most bytes that a partition adds to a transaction shared with others. Writing more takes
    longer than what the transaction itself costs."""
    max_shared_parts: int = 64
    """Most partitions that share a transaction: the commit metadata of all of them, at most 8 KB
    each, must fit into one batch of the group's, of which a broker takes 1 MB by default."""
    max_shared_wait_s: float = 0.5
    """A partition that has waited so long for a transaction to share has one of its own, so that a
    transaction that takes its whole timeout delays the others no longer than this."""
    unshared_after_delay_s: float = 5.0
    """For so long after such a wait a partition shares none with other partitions."""
    unshared_after_refusal_s: float = 15.0
    """The same after a refusal before a transaction begins. This is longer than any pause before
    what was refused is tried again (`max_transaction_retry_s`)."""
    unshared_after_timeout_s: float = 3600.0
    """The same after a transaction that took too long, by itself or as a part of a shared one: what
    partitions write together may be too much, and each try costs a whole timeout."""
    unshared_after_failure_s: float = 120.0
    """For so long after a failed transaction a partition shares none with other partitions. This is
    longer than answers to an unavailable target are left out, so that its next try fails alone."""
    source_check_interval_s: float = 1.0
    """Interval of the checks whether the source topic was replaced or truncated, where results
    are read instead of it."""

    resume_fraction: float = 0.75
    """Reading resumes at this part of the budget, so that it does not flap around the limit."""
    max_idle_shares: int = 1024
    """Most remembered shares that hold nothing: callers name tenants as they like."""
    max_age_marks: int = 256
    """Chunks whose timestamps are kept; beyond it, neighbours are merged."""
    order_prune_at: int = 1024
    """Remembered offsets or keys at which those that no longer matter are dropped."""


class ProtocolTuning(Struct, frozen=True):
    """Tuning values of `headrace.protocol`: bounds of its caches and copies.

    Its functions are pure, so the default values apply to every process.
    """

    cached_header_values: int = 1024
    """Parsed values in the cache of each header; callers choose them."""
    cached_content_types: int = 256
    """Content types in each cache."""
    cached_frames: int = 1024
    """Encoded responses, without their tensors' bytes, and encoded timings."""
    templated_output_bytes: int = 4096
    """Outputs up to this size are filled into a template; larger ones are joined with one copy."""
    cached_output_metadata: int = 256
    """Names, datatypes and shapes of outputs that decoded results share."""
    cached_tensor_positions: int = 256
    """Positions of a tensor in a value, by the sizes of both."""
    compared_tensor_bytes: int = 4096
    """Tensors up to this size are compared at the cached position; others by their address."""
    cut_run_requests: int = 12
    """Fewest requests that follow each other in a chunk, on average, for which the columns of a
    batch are cut out of it. One more chunk in a batch costs its writer and its reader 20 µs
    together; columns that are made anew cost 1.5 µs for each request."""
    copied_row_bytes: int = 1024
    """Rows up to this size are copied: faster than a view, and no other rows stay alive."""
    cached_row_layouts: int = 256
    """Sizes and counts of rows in the cache of their layouts."""
    described_value_bytes: int = 256
    """Values up to this size are shown in the error text of a request that cannot be decoded."""
    counted_value_bytes: int = 65_536
    """Values up to this size are decoded to count their elements for such a text."""

    converted_inline_bytes: int = 32 * 1024
    """Larger answers in JSON, or with BYTES, are decoded on a thread by a client that has one. So
    much takes at most 8 ms, which are strings of one character in JSON, and mostly 0.2 ms; a thread
    costs 0.1 ms.
    """
    compressed_from_bytes: int = 1024
    """Smaller requests and answers are not compressed."""
    zstd_level: int = 3
    """Level of what is compressed with zstd: its own default."""
    deflate_level: int = 1
    """Level of what is compressed with gzip or deflate: the fastest."""
    brotli_quality: int = 4
    """Quality of what is compressed with br, of 11: about as fast as zstd."""
    max_decompressed_bytes: int = 1 << 30
    """Largest value that is decompressed where no setting limits it, as in a client."""
    first_zstd_bytes: int = 64 * 1024
    """First room for what is made of zstd, besides eight times its size; then eight times that."""
    first_inflated_bytes: int = 256 * 1024
    """So much of gzip and deflate is made before it is looked at whether this may be a bomb."""
    dense_ratio: int = 64
    """It may, if it has become more than so many times as large by then."""
    brotli_piece_bytes: int = 256
    """Bytes of a br stream that are decompressed in the first step. A step is doubled after each
    one, and reset after one that yields more than `dense_ratio` times its size."""
    brotli_part_bytes: int = 256 * 1024
    """Bytes that one step of br may yield, and as many again in its buffer, before the limit is
    checked."""
    payload_part_bytes: int = 64 * 1024
    """Bytes of a tensor's text in JSON that are converted at a time; records in larger payloads are
    decoded one by one."""
    located_values: int = 65_536
    """Values of a tensor's text that is not nested like its shape, up to which it is decoded as a
    whole to say where: so many take up to 20 ms.
    """
    record_memory_bytes: int = 512 * 1024 * 1024
    """Most memory that the values of records in JSON, CSV and Protobuf may take, estimated from the
    bytes that begin values: 128 MiB of empty objects in JSON would take 6 GB, 64 MiB of lines with
    one digit in CSV 3 GB, and 64 MiB of empty messages of 40 fields in Protobuf 20 GB."""
    located_damage_bytes: int = 256
    """Damage in a compressed value is located to so many bytes."""


class TransportTuning(Struct, frozen=True):
    """Tuning values of `headrace.transport`."""

    max_waiting_requests: int = 4096
    """Requests that may wait to be written to a topic; above it, stages wait."""
    max_write_delay_s: float = 0.01
    """Longest delay of a write to a topic; there is none at low request rates."""
    undelayed_requests_per_s: float = 6400.0
    """A steady rate up to this many requests per second is never delayed."""
    counted_request_bytes: int = 20 * 1024
    """So many bytes of inputs count as one more request: with 150 KB, a steady rate up to 770 per
    second is never delayed. It keeps four processes as busy as 6,400 small ones."""
    max_record_requests: int = 256
    """Most requests in an `items` or `results` record. The record is acknowledged, deferred and
    read again as a whole."""
    max_record_bytes: int = 128 * 1024
    """Payload of an `items` or `results` record of several requests; a larger one travels alone."""
    max_record_source_bytes: int = 1024 * 1024
    """The same for values that are only in their source records: they are charged and read again
    with the record."""
    same_write_within_s: float = 0.001
    """Writes to several partitions that start within this time are not delayed separately."""
    burst_memory_s: float = 0.04
    """How much of the undelayed rate a burst may exceed; bounds the delays after it."""

    heartbeat_s: float = 1.0
    """Interval of an executor's announcements without news."""
    assignment_check_s: float = 0.1
    """Longest delay of announcing partitions that were assigned or revoked."""
    version_check_s: float = 0.05
    """Interval at which batches that wait for a version to load are looked at."""
    completion_delay_s: float = 0.01
    """Longest delay of announcing completions. A batch that took longer is announced at once."""
    events_poll_s: float = 0.2
    """Longest poll of the executors' events; silent executors are noticed between polls."""
    announcements_pause_s: float = 0.05
    """Pause between polls for what other processes have ready. It delays changes of models; without
    it, each batch that an executor announces as complete would cost a fetch in every process."""
    events_retry_s: float = 0.5
    """Pause after the end of the events topic could not be read."""
    max_polled_events: int = 500
    """Events of one poll."""

    min_batches_per_instance: int = 2
    """Batches in flight to an instance: one runs, and the next one is there when it ends."""
    max_batches_per_instance: int = 64
    """Most batches in flight to an instance, however short its runs are."""
    round_trips_observed: int = 31
    """Batches whose round trips determine the number in flight."""
    max_undirected_batches: int = 4
    """Unacknowledged batches while no executor is known."""
    max_batches_per_write: int = 64
    """Most batches in one write to an executor, so that the others get their share: as many as may
    be in flight to one instance. Fewer cost every process more records of fewer batches: with 16 a
    request of the digits model takes 1.13 times the processor time of all."""
    completion_timeout_s: float = 60.0
    """A batch without a completion for this long no longer counts as in flight."""
    source_near_offsets: int = 16
    """Source records at most this far apart are read with one fetch."""
    source_fetch_bytes: int = 8 * 1024 * 1024
    """Most bytes of values to read with one fetch, and of others that come with them. A larger one
    is read alone."""
    source_record_overhead_bytes: int = 512
    """Estimate of what a source record takes besides its value: batch, key and headers."""
    source_surplus_bytes: int = 16 * 1024 * 1024
    """Most bytes of source records to keep that came with others."""
    source_retry_first_s: float = 0.1
    """First pause after source records could not be read; later ones double."""
    source_retry_max_s: float = 1.0
    """Longest pause after source records could not be read."""
    shared_small_bytes: int = 8 * 1024 * 1024
    """Shared memory is used from its start again beyond this, if everything in it was read."""
    shared_large_bytes: int = 32 * 1024
    """Values that are larger on average are not written beyond `shared_small_bytes`: when they come
    faster than they are read, they cost no more to read from the log."""
    shared_far_ahead_pause_s: float = 20e-6
    """Pause for each request written while more than a sixteenth of shared memory was not read yet:
    values that find no room there are read from the log, which takes an executor twice as long, and
    memory that was used before is faster than more of it."""
    shared_reserve_bytes: int = 16 * 1024 * 1024
    """Space in the directory of shared memory that is left to others."""
    shared_abandoned_s: float = 10.0
    """Values in full shared memory of which none was read for so long are overwritten."""
    shared_rings: int = 16
    """Rings of other processes that are kept open."""

    rebind_retry_after_ms: int = 1000
    """When a request whose model version is not in this process may be sent again."""


class KafkaTuning(Struct, frozen=True):
    """Tuning values of `headrace.log.kafka`."""

    # Connections

    reconnect: Backoff = Backoff(first_s=0.05, longest_s=1.0, jitter=0.2)
    """Pauses before an address is tried again that could not be reached. These are the defaults of
    `reconnect.backoff.ms`, `reconnect.backoff.max.ms` and the jitter of Kafka's clients."""
    bootstrap_timeout_s: float = 5.0
    """How long one bootstrap server may take to answer, if the request timeout is not shorter."""
    request_retry_s: float = 0.1
    """Pause before a request is repeated that a broker could not answer yet."""
    stable_offsets_timeout_s: float = 5.0
    """How long committed offsets are waited for that an open transaction commits; another process
    that has them may still be about to end it."""
    fetch_end_wait_s: float = 2.0
    """How long a fetch by offset waits for a record at the end of the log: a new leader shows what
    was acknowledged before a moment later."""
    metadata_max_age_s: float = 60.0
    """How long a new partition or topic can stay unnoticed."""
    connection_max_idle_s: float = 540.0
    """An idle connection is closed after this, before the broker closes it
    (`connections.max.idle.ms`, 10 minutes)."""
    close_timeout_s: float = 1.0
    """How long a socket or a cancelled task may take to end before it is abandoned."""
    leave_timeout_s: float = 2.0
    """How long a closing member waits for the coordinator to let it leave its group."""

    # Consumers

    rebalance_timeout_s: float = 30.0
    """How long the group waits for a member to finish `on_revoked` and join again."""
    join_margin_s: float = 5.0
    """Time of a request beyond the rebalance timeout: JoinGroup is answered only when every member
    has joined."""
    max_poll_interval_s: float = 300.0
    """A member that does not poll for this long is removed from its group."""
    fetch_max_wait_s: float = 0.05
    """How long a broker may hold a fetch for records to arrive (`fetch.max.wait.ms`). A partition
    that is resumed or sought may wait for the end of that fetch."""
    idle_fetch_max_wait_s: float = 0.5
    """The same for an idle consumer; the default of Kafka's clients."""
    idle_after_s: float = 0.25
    """A consumer is idle after this time without a record, a seek or a change of what it reads."""
    fetch_max_bytes: int = 16 * 1024 * 1024
    """Limit of one fetch response."""
    partition_fetch_max_bytes: int = 1024 * 1024
    """Limit of one partition's part of a fetch response."""
    contact_check_after_s: float = 5.0
    """After this long without a response, check whether the brokers refuse us; repeat at this
    interval."""
    header_overhead_bytes: int = 128
    """Charged for each header against the bytes of a poll: as an object it is larger than its
    text."""
    few_records: int = 16
    """After a poll of no more records, the next fetch is sent by the next poll, not at once."""
    unmeasured_batch_bytes: int = 512 * 1024
    """The records of a batch up to this size are not measured one by one for the bytes of a
    poll."""
    small_checksum_bytes: int = 2048
    """The checksum of a batch up to this size is computed by aiokafka, which needs no copy."""
    checksum_part_bytes: int = 64 * 1024
    """The checksum of larger ones is computed in parts, which are copied within the processor's
    cache."""
    max_gaps_per_poll: int = 100
    """A poll that has found this many gaps returns no more records, so that its report is
    bounded."""

    # Producers

    max_batch_bytes: int = 256 * 1024
    """One batch is in flight per partition, so a partition's throughput is this size per round
    trip."""
    max_request_bytes: int = 16 * 1024 * 1024
    """Limit of one produce request, which holds batches of several partitions."""
    packed_records: int = 256
    """So many answers of a transaction are encoded and then packed, before the next ones are."""
    flush_timeout_s: float = 3.0
    """How long a closing producer waits for acknowledgements."""
    producer_id_retry: Backoff = Backoff(first_s=0.1, longest_s=1.0, jitter=0.2)
    """Pauses before a producer id is asked for again."""
    transaction_retry: Backoff = Backoff(first_s=0.002, longest_s=0.1, jitter=0.0)
    """Pauses before a request of a transaction is repeated. The first is also the minimum pause
    after a transaction: the broker refuses a new one while it writes the markers of the last."""
    markers_longest_s: float = 0.02
    """Limit of the pause before a request that was refused because of those markers."""

    # The cache of topics

    topic_timeout_s: float = 1.0
    """How long a broker may take to describe a topic to a producer."""
    absent_topic_ttl_s: float = 1.0
    """How long a topic counts as absent, or as forbidden, without another request."""
    partition_count_ttl_s: float = 30.0
    """How long the number of a topic's partitions is cached."""
    topic_limits_ttl_s: float = 300.0
    """How long a topic's limits are cached."""
    refusing_limits_ttl_s: float = 1.0
    """How long limits by which a record was refused are cached from then on."""
    cached_topics: int = 10_000
    """The most topics in each cache."""


class MemoryTuning(Struct, frozen=True):
    """Tuning values of `headrace.log.memory`."""

    max_batch_bytes: int = 256 * 1024
    """Limit of a batch, the same as in the Kafka adapter."""
    metadata_timeout_s: float = 1.0
    """How long a producer waits for the number of a topic's partitions."""
    flush_timeout_s: float = 3.0
    """How long a closing producer waits for acknowledgements."""
    listener_timeout_s: float = 3.0
    """How long a closing member waits for a call of its listener that is in progress."""
    stable_offsets_timeout_s: float = 5.0
    """How long committed offsets are waited for that an open transaction commits."""


class ModelTuning(Struct, frozen=True):
    """Tuning values of `headrace.models` and `headrace.device`."""

    interrupt_arrival_s: float = 0.001
    """A requested interruption is raised within the next few instructions of its thread."""
    window_runs: int = 15
    """Number of runs per batch size that the median duration is taken over."""
    forget_after_runs: int = 1024
    """Age, in runs of the shape class, after which a run is dropped when its size is seen again."""
    weight_half_life_runs: int = 256
    """Number of runs of other sizes after which the weight of a size halves."""
    least_weight: float = 1e-6
    """Lower bound of a size's weight, so that the weights never underflow to a sum of 0."""
    refit_after_runs: int = 16
    """Runs between two fits of the curve; a class with fewer runs is fitted after each."""
    exact_rows: int = 64
    """Sizes up to this one are kept apart; larger ones share sixteen buckets per doubling."""
    shape_classes: int = 64
    """Maximum number of shape classes per version; the least recently seen one is evicted."""
    shown_shape_classes: int = 8
    """Number of shape classes that `/status` shows."""
    margin_batches: int = 64
    """Number of batches that the safety margin of predictions is computed from."""
    margin_quantile: float = 31 / 32
    """Share of the batches whose lateness the margin covers."""
    neighbour_runs: int = 3
    """Number of runs before, and of runs after, a run that measure how slow the machine was during
    it. In simulated minutes of magika on a machine whose speed changes by a fifth every two
    seconds, 97 % of the best throughput was missed in 3 % of 200 seeds; without normalization it
    was 66 %.
    """
    max_slowdown: float = 2.0
    """Above this, or below its inverse, the stored durations are rescaled; otherwise many small
    errors of durations and slowdown would make both drift without bound.
    """
    batch_overhead_us: float = 100.0
    """Approximate overhead of a batch beside its run: closing, dispatching and splitting it. For
    runs that are shorter than this, it makes large batches win, however noisy the durations are.
    """
    sufficient_throughput: float = 0.99
    """Share of the best throughput that is good enough: the smallest size that reaches it is
    chosen, because its requests wait for fewer others and its buffers are smaller.
    """

    image_parts: int = 16_384
    """Most chunks, segments, fields or strips of an image file: each of them costs a look."""
    image_resized_pixels: int = 16_777_216
    """Pixels to which any image may be resized, 4 bytes each; beyond it, `max_pixels` counts."""
    sound_parts: int = 65_536
    """Most chunks, blocks or pages of a sound file: each of them costs a look."""
    sound_block_samples: int = 65_536
    """Samples that are decoded at once, over all channels."""
    mel_columns: int = 256
    """Columns of a spectrum that are made at once, which bounds the memory beside the result."""
    image_scans: int = 64
    """Most scans of a JPEG, each of which is a pass over all pixels; tools write about ten."""

    read_apart_from_bytes: int = 16 * 1024 * 1024
    """ONNX files from this size on are parsed and checked in a child process: it takes about 2 ms
    for each MB, in which the process stands still. The child takes about a second to start.
    """
    reader_niceness: int = 10
    """Niceness of such a child: processes that serve have priority."""
    reader_timeout_s: float = 600.0
    """Longest time of such a child."""
    probe_rows: int = 4
    """Number of rows in the batches of the probe; the first and the last one stay in place."""
    probe_budget_s: float = 5.0
    """Time limit of the probe; no run starts after it, and the verdict is `undecided`."""
    probe_magnification: float = 10_000.0
    """Factor of the values in the rows that must not influence their neighbours."""
    probe_text_bytes: int = 1000
    """Length of the `BYTES` elements that stand for large values."""
    undecided_rows: int = 4
    """Batch size limit while requests themselves decide on batch safety."""
    fp32_tolerance: float = 1e-4
    """Allowed difference of batched from unbatched answers, relative to the output's scale."""
    tf32_tolerance: float = 1e-2
    """The same, on a GPU that multiplies fp32 as TF32."""
    fp16_tolerance: float = 1e-2
    """The same, for models with fp16 weights, inputs or outputs."""
    bf16_tolerance: float = 3e-2
    """The same, for models with bfloat16 weights, inputs or outputs."""

    free_sizes: tuple[int, ...] = (8, 1, 64, 224)
    """Sizes of made-up free dimensions other than the batch, tried in this order."""
    max_made_up_row_bytes: int = 64 * 1024 * 1024
    """Limit of a made-up row. No request can be that large, and half a dozen rows are made."""
    made_up_text_bytes: int = 64
    """Assumed size of a made-up `BYTES` element."""
    seed: int = 20_180_706
    """Seed of made-up values, so that a model gets the same verdict at each load."""
    timed_runs: int = 3
    """Timed runs per size at load: more than one, so that a single delayed run changes nothing."""
    timing_budget_s: float = 1.0
    """Time limit of all timed runs; a slow model gets fewer, or none of the large sizes."""

    cached_layouts: int = 1024
    """Maximum number of input shapes per version whose check is cached."""
    max_bound_output_bytes: int = 65_536
    """Outputs of a run up to this size are bound; for larger ones the copy out of the bound memory
    costs more than the binding saves.
    """
    loading_retry_after_ms: int = 1000
    """`retry-after` of a request that was refused because its model is loading."""
    listed_names: int = 20
    """Maximum number of names that an error text lists."""
    store_attempts: int = 5
    """Attempts of one request to an object store."""
    store_retry_first_s: float = 0.2
    """Pause after the first failed attempt; later ones double."""
    store_retry_max_s: float = 5.0
    """Longest pause between two attempts."""
    store_cached_s: float = 10.0
    """Longest wait for a store, with all attempts, where the cache of the machine can stand in for
    it: a process that starts while a store takes requests and does not answer waits no longer.
    """
    store_read_bytes: int = 8 * 1024 * 1024
    """Size of the ranges in which files are downloaded; one must come within 30 s."""
    store_index_attempts: int = 20
    """Attempts to write a store's index while others write it; one is used to read it again."""
    store_error_chars: int = 300
    """Most characters of a store's error that are shown."""
    cache_lock_timeout_s: float = 600.0
    """Longest wait for another process of this machine that downloads."""
    cache_lock_interval_s: float = 0.05
    """Interval of the attempts to get a lock of the cache."""
    listed_differences: int = 5
    """Most differences from a manifest that the reason of a refusal shows."""
    checksum_chunk_bytes: int = 1024 * 1024
    """Bytes that are read at once for a checksum."""

    device_reserve_bytes: int = 512 * 1024 * 1024
    """Device memory that is not requested explicitly: the context, cuDNN's workspaces, arena
    rounding.
    """
    kernel_block_threads: int = 256
    """Threads in a block of a CUDA kernel."""
    kernel_max_blocks: int = 4096
    """Maximum number of blocks of a CUDA kernel: more than enough to fill any GPU; each thread then
    handles several elements.
    """


class ControlTuning(Struct, frozen=True):
    """Tuning values of `headrace.control`."""

    snapshot_every: int = 64
    """Changes from one snapshot in the control topic to the next."""
    read_timeout_s: float = 30.0
    """Deadline for reading the control topic to its end."""
    poll_s: float = 0.5
    """Longest wait of one poll of the control topic."""
    marker_poll_s: float = 0.02
    """The same while it is read to its end."""
    poll_records: int = 1000
    """Most records of one poll of the control topic."""
    outcome_reads: int = 5
    """How often a writer reads the control topic to learn whether its change was made."""
    finish_attempts: int = 10
    """How often the second change of a load is tried while changes of other models come first."""
    listen_s: float = 2.5
    """Time in which each process is heard that follows the control topic."""
    change_timeout_s: float = 600.0
    """Longest wait of a call that loads or unloads a model for the processes to follow."""
    config_characters: int = 64 * 1024
    """Longest configuration that a call sends with a load: so much is read in 0.1 s."""
    silent_s: float = 10.0
    """Silence after which such a process is taken for ended."""
    retry_first_s: float = 0.1
    """Pause after the first failed reading of the repository after a change; later ones double."""
    retry_max_s: float = 30.0
    """Longest of these pauses."""


class SchemaTuning(Struct, frozen=True):
    """Tuning values of `headrace.models.schema_registry`."""

    concurrent_requests: int = 4
    """Requests to the registry at a time."""
    cached_schemas: int = 256
    """Schemas, ids and refusals that are kept, each."""
    framings_per_version: int = 64
    """Schemas that are kept parsed for each version."""
    max_response_bytes: int = 512 * 1024
    """Larger schemas are not read."""
    refusal_s: float = 10.0
    """A schema that is not there, or is refused, is not asked for again for so long."""
    max_container_bytes: int = 64 * 1024 * 1024
    """Most bytes that the blocks of an Avro container may yield."""
    max_avro_memory_bytes: int = 512 * 1024 * 1024
    """Most memory that records and lists in the arrays and maps of a payload in Avro may take: 64
    MiB of records of one byte would take 18 GB."""
    container_schemas: int = 16
    """Schemas of such containers that are kept parsed, for each version."""
    max_empty_values: int = 16
    """Most values of a record in Avro that take no bytes, such as fields of the type null."""
    max_decimal_bytes: int = 128
    """Most bytes of a decimal in Avro, which FP64 can hold; making it takes the square of that."""
    nested_messages: int = 32
    """Most indexes of a message of Protobuf in its schema."""
    shown_chars: int = 200
    """Most characters of a registry's message that an error shows."""
    backoff: Backoff = Backoff(0.1, 5.0)
    """Pauses while the registry cannot be reached."""
    failures_per_round: int = 4
    """After this many failed requests, no further schemas are asked for before the next pause."""
    expiry_interval_s: float = 0.1
    """Shortest time between two searches for expired requests among those that wait."""


class ClaimTuning(Struct, frozen=True):
    """Tuning values of `headrace.claims`."""

    connect_timeout_s: float = 5.0
    """Time to connect to a store."""
    read_timeout_s: float = 10.0
    """Longest silence of a store while an object is read."""
    chunk_bytes: int = 256 * 1024
    """Bytes of an object that are read, and hashed, at once: less than a millisecond."""
    file_threads: int = 16
    """Most threads that read, or write, files of one directory at a time, or hang there."""
    backoff: Backoff = Backoff(0.1, 5.0)
    """Pauses between attempts while a store is unavailable."""


class TransformTuning(Struct, frozen=True):
    """Tuning values of `headrace.transforms`."""

    interrupt_grace_s: float = 5.0
    """Time for a transform to end after it was interrupted, before the process ends."""
    decode_limit_s: float = 60.0
    """Time to decode a large request in a child process, before the child is killed."""
    start_s: float = 120.0
    """Time for a child process of transforms to import what it needs, before it is killed."""
    starts: int = 20
    """So many children in a row may end before they are ready, until the payload for which they
    were started is refused: somebody kills them, or nothing can be imported any more."""
    restart: Backoff = Backoff(0.05, 5.0)
    """Pauses before a child process of transforms is replaced; back to the first after a payload
    that it transformed."""
    shared_input_bytes: int = 64 * 1024
    """Inputs of at least this size come from child processes in shared memory, smaller ones through
    their sockets: a mapping takes whole pages, and a process may have 65,530 of them."""
    check_s: float = 0.05
    """Interval at which the thread is looked at while it is between two payloads."""


class IngestTuning(Struct, frozen=True):
    """Tuning values of `services.ingest`."""

    max_cached_layouts: int = 256
    """Layouts in the decode cache."""
    max_layout_bytes: int = 1024
    """Most bytes around the tensor of a cached layout; values with more are decoded each time."""
    layout_mismatches: int = 64
    """A layout is replaced after this many values of its length that do not match it."""
    copied_tensor_bytes: int = 512
    """Tensors up to this size are copied: a third of a view's time, and no more memory."""

    room_interval_s: float = 0.1
    """Interval at which a claim that waits for room looks for it, besides each acknowledgement."""
    inline_record_bytes: int = 16 * 1024
    """Records up to this size become inputs on the event loop, larger payloads on a thread."""
    transformed_bytes: int = 8 * 1024 * 1024
    """Inputs of this size, made by transforms on the thread, are passed on before others are made:
    an image has many times the bytes of its file."""
    unknown_input_bytes: int = 64 * 1024
    """Inputs that are expected of a payload while its model's transform has made none yet."""
    granted_s: float = 0.1
    """Payloads that are expected to take a worker this long are granted to it ahead."""
    gathered_s: float = 0.02
    """Inputs that workers have made are passed on together after this time: one by one,
    the requests of quick transforms would also run one by one."""
    marked_transforms: int = 16
    """Payloads that are transformed under one crash marker: after an unclean end, each of them must
    run alone."""
    expiry_interval_s: float = 0.01
    """Least time between two looks at the deadlines of payloads that wait for a worker."""
    inline_json_bytes: int = 64 * 1024
    """Requests in JSON up to this size are decoded on the event loop, larger ones on a worker: a
    byte of UINT8 in JSON takes 25 ns."""
    inline_texts_bytes: int = 256 * 1024
    """Inputs of BYTES in MessagePack up to this size are checked on the event loop, larger ones on
    a worker: they take 5 ns for each byte."""

    far_ahead_requests: int = 4096
    far_ahead_pause_s: float = 40e-6
    """With more than `far_ahead_requests` of a partition in flight that have not ended, pause
    `far_ahead_pause_s` for each request read. Reading ahead still helps to refuse late requests
    early and to share fairly, but must not take time from the requests read before."""

    inline_decompressed_bytes: int = 512 * 1024
    """Bytes made of compressed values on the event loop before it does something else; gzip
    takes up to 4 ms for them. A value that yields more is left to a worker of transforms."""

    hold_loop_s: float = 0.01
    """Longest time to read without yielding; images or large JSON take milliseconds each."""
    double_records_for_s: float = 0.001
    """Reading shorter than this doubles the records to read between two looks at the clock."""
    max_records_at_once: int = 128
    """Most records read between two looks at the clock."""


class BatcherTuning(Struct, frozen=True):
    """Tuning values of `services.batcher`."""

    rate_half_life_us: int = 1_000_000
    """After this much time with a backlog, the learned service rate counts half."""
    rate_memory_us: int = 5_000_000
    """The service rate is forgotten after this long without a backlog: one from a bad moment could
    refuse so much that no backlog forms to correct it."""
    max_stall_ratio: int = 4
    """A batch counts as at most this many times as long as usual: a stall of half a second says
    nothing about the next batch."""
    explore_every_batches: int = 128
    """Every so many batches that close with more rows waiting than they take, one takes twice or
    half the best known size, alternately, so that a size that has become better is found."""
    early_batches: int = 128
    """This many first batches explore more often: little is known of most sizes then, and all
    samples of a size may come from one bad moment."""
    explore_every_early_batches: int = 8
    """The same as `explore_every_batches`, for the first batches."""
    max_compared_tenants: int = 16
    """Most waiting tenants whose rows are looked at to predict a wait; the others are estimated by
    their number and their rows together."""
    timer_step_us: int = 1000
    """How late a timer of the event loop may fire."""
    priority_step_us: int = 100_000
    """Head start for each step of `x-priority`, in waiting time."""
    patience_us: int = 5_000_000
    """Between shape classes, a request with a later deadline or none counts as due this long after
    it arrived, so that no request starves."""
    max_remembered_tenants: int = 1024
    """Tenants whose served rows are kept, while several wait at the same time."""
    max_stale_deadlines: int = 64
    """Deadlines of requests that no longer wait to keep before they are removed."""
    max_stale_entries: int = 32
    """Outdated entries of any other queue to keep before they are removed."""
    max_stale_bytes: int = 1024 * 1024
    """Bytes of inputs of ended requests to keep in a queue before these are removed."""


class ExecutorTuning(Struct, frozen=True):
    """Tuning values of `services.executor`."""

    inline_record_bytes: int = 16 * 1024
    """Records of a run up to this size get their outputs on the event loop, more on a thread."""
    inline_answer_rows: int = 64
    """Rows of a run whose classes are written on the event loop; more are written on a thread."""

    run_backoff: Backoff = Backoff(0.05, 1.0)
    """Pauses before a run is repeated after a transient error; without jitter."""
    max_run_attempts: int = 10
    """Attempts to run a batch: enough to wait five seconds for a busy backend, if deadlines allow.
    """
    max_half_attempts: int = 3
    """Attempts to run a part of a batch that has been retried as a whole already, in vain."""
    max_waiting_parts: int = 16
    """While more parts of failed batches wait, no fresh batch is taken; one batch of 1,000 requests
    that fails has no more than 11 at a time."""
    prefetch_min_run_us: int = 2000
    """Runs shorter than this are not prefetched for: event loop timers have steps of 1 ms."""
    prefetch_lead_us: int = 1000
    """How long before a run's predicted end the next batch closes, besides the time to gather it.
    """
    inline_max_run_us: int = 200
    """Runs shorter than this are made on the event loop: the hand-off to a thread costs 20 to 60
    microseconds, and more while the loop is busy."""
    inline_cut_off_s: float = 1.0
    """A longer run on the event loop is cancelled and repeated on the thread."""
    inline_window_runs: int = 16
    """Number of last runs that decide whether the next one is made on the event loop; even."""
    cancel_grace_s: float = 5.0
    """How long a cancelled run, or a thread that unloads, may take to end."""
    watchdog_grace_s: float = 10.0
    """How much longer than `max_execution_s` a run may take before the process counts as hung; more
    than `cancel_grace_s`, so that a run that can be cancelled is not reported."""
    trial_start_s: float = 120.0
    """Time for the child process of a trial load to import what it needs, besides `max_load_s`."""
    max_trial_refusals: int = 1024
    """Versions that ended their trial loads, and are not tried again."""
    trial_niceness: int = 19
    """Niceness of such a child: processes that serve have priority. On cores that are all busy it
    still gets 1.5 % of one, with which 0.8 s of work take less than a minute."""
    memory_wait_s: float = 30.0
    """How long a version for which requests wait itself waits for memory that busy versions hold.
    """
    memory_check_s: float = 0.05
    """Interval at which it looks for versions that have become idle."""
    max_host_layouts: int = 256
    """Combinations of input shapes for which a host block keeps its arrays."""
    copy_each_min_bytes: int = 4096
    """Tensors of this size are copied one by one; smaller ones are joined first, which costs less.
    """
    in_place_min_bytes: int = 65536
    """A single request of at least this size runs in place: copying costs more than binding it."""
    comparison_batches: int = 16
    """Number of agreeing batches that make an undecided version batchable."""
    comparison_every_batches: int = 16
    """After the first `comparison_batches` batches, one in this many is compared."""
    max_rows_in_error: int = 10
    """Rows with non-finite outputs that an error text lists."""
    ring_slots: int = 3
    """Slots of a ring: one is filled, one is computed and one is copied back at the same time."""
    ring_exact_rows: int = 4
    """Runs of a ring are prepared for each number of rows up to this one."""
    ring_step_rows: int = 4
    """Above `ring_exact_rows`, runs of a ring are prepared in steps of this many rows. Growing
    steps, such as powers of two, waste more of the device than they save of its memory."""
    max_buffered_answers: int = 512
    """Most finished requests that an instance with quick runs holds back, to send them together."""
    buffer_answers_s: float = 0.002
    """Longest time that quick runs may follow each other without yielding the event loop."""
    device_memory_period_s: float = 1.0
    """Least time between two readings of a device's free memory."""


class ResponderTuning(Struct, frozen=True):
    """Tuning values of `services.responder`."""

    charged_from_bytes: int = 1024
    """Smaller outputs are covered by the fixed overhead charged for each request."""

    reply_topic_cache_s: float = 60.0
    """How long the partition count of a reply topic is cached."""
    max_cached_reply_topics: int = 10_000
    """Reply topics in the cache; callers choose the names."""
    max_reply_topic_lookups: int = 64
    """Reply topics that are looked up at the same time."""
    reply_topic_retry_s: float = 0.5
    """Pause before a look-up that failed is retried."""

    inline_compressed_bytes: int = 64 * 1024
    """Answers that are compressed on the event loop together; gzip takes up to 3 ms for them. More
    go to a thread."""

    max_unacknowledged_chunks: int = 16
    """Chunks of answers that wait for acknowledgements, at least once and in no order."""
    max_unacknowledged_bytes: int = 64 * 1024 * 1024
    """Outputs of these chunks, together."""
    max_stored_answer_bytes: int = 256 * 1024 * 1024
    """Outputs of the answers that are being put into a store, together; with more, others wait."""
    target_stalled_after_s: float = 1.0
    """A target that has not acknowledged for this long no longer delays other targets."""

    max_queued_answer_bytes: int = 64 * 1024 * 1024
    """Outputs that are queued for the steps of all source partitions."""
    dead_letter_values: int = 16
    """Most values that are read together for the dead letters of requests that failed in the
    responder: what they take is charged to nothing."""
    max_step_answers: int = 2048
    """Answers in one step: they are encoded without yielding, which blocks the event loop."""
    waiting_answers_retry_s: float = 1.0
    """Answers that had to wait are retried after this time, or with the next answers."""

    transaction_timeout_s: float = 10.0
    """Timeout of a transaction on the embedded log, which has no `transaction_timeout_ms`."""
    transaction_retry_s: float = 0.1
    """Pause before a failed transaction is retried; doubled for each further failure."""
    max_transaction_retry_s: float = 5.0
    """Longest of these pauses."""
    stalled_target_retry_s: float = 2.0
    """Pause before answers for a stalled reply partition are retried; doubled if they fail."""
    max_stalled_target_retry_s: float = 60.0
    """Longest of these pauses."""
    forbidden_topic_retry_s: float = 30.0
    """How long answers for a topic without write permission go to `responses` untried."""
    max_forbidden_topics: int = 10_000
    """Forbidden topics that are remembered."""
    answer_overhead_bytes: int = 256
    """Approximate size of an answer without its outputs and its key."""

    quick_transaction_share: float = 0.25
    """A transaction is quick if it took no more than this share of its timeout."""
    transaction_size_patience: int = 32
    """Quick transactions before a size that timed out is tried again; doubled if that fails."""
    max_transaction_size_patience: int = 4096
    """Most quick transactions before such a try."""
    unlimited_transaction_bytes: int = 64 * 1024 * 1024
    """From this size on a transaction has no limit, since the queue itself is bounded."""

    consecutive_steps_within_s: float = 0.01
    """A step that begins later than this after the last one follows a silence."""
    linger_share: float = 0.1
    """Longest linger, as a share of the time in which the requests in flight are answered."""
    linger_answers: int = 256
    """With this many answers of each partition that shares it, the cost of a transaction itself is
    small."""
    max_linger_s: float = 0.1
    """Longest linger."""
    min_linger_s: float = 0.005
    """A shorter linger means that there is no backlog, so there is none."""


class AccessTuning(Struct, frozen=True):
    """Tuning values of `headrace.access`."""

    file_check_interval_s: float = 5.0
    """Time between two looks at the files of certificates and keys."""
    first_read_timeout_s: float = 60.0
    """Limit of reading them at the start, as of other work that hangs (`limits.max_stall_s`)."""
    max_token_bytes: int = 6144
    """Longest JSON Web Token of a caller; the servers accept 8 KiB of headers."""
    cached_tokens: int = 4096
    """Tokens whose signatures were verified, at 1 KiB each."""


class RuntimeTuning(Struct, frozen=True):
    """Tuning values of `headrace.runtime` and `headrace.telemetry`."""

    silent_after_s: float = 10.0
    """Silence after which an executor counts as dead on the embedded log, which has no session
    timeout.
    """

    unload_check_interval_s: float = 1.0
    """Interval between two searches for replaced model versions that are no longer used."""
    series_kept_s: float = 600.0
    """Interval between two searches for metrics of versions that are no longer loaded. Series that
    have not changed since the last one are removed, long after the last scrape has seen them.
    """
    series_kept_without_models_s: float = 86_400.0
    """The same in a process that loads no models, and so does not know which versions are loaded.
    """
    reload_notice_after_s: float = 5.0
    """A reload of the models that takes longer is logged while it runs: it may be waiting for an
    import.
    """
    last_commit_timeout_s: float = 2.0
    """Time for committing what is acknowledged when the drain times out. If the commit is not
    answered, that work is repeated by another process.
    """
    forced_end_s: float = 1.0
    """Time for the end of a process after a second signal. What it still closes then is cut off, as
    by SIGKILL: it may wait for brokers that do not answer.
    """
    thread_switch_interval_s: float = 0.0005
    """How long a thread keeps the interpreter while another one waits for it. With Python's 5 ms, a
    busy event loop delays the dispatcher that long for each completed run.
    """
    gc_thresholds: tuple[int, int, int] = (50_000, 20, 50)
    """Python's (700, 10, 10) repeatedly traverses all requests in flight: half the time at a deep
    backlog. The path of a request creates no reference cycles (tests/flow/test_guards.py); cycles
    from a user's model are still collected, later.
    """

    worker_restart: Backoff = Backoff(first_s=0.5, longest_s=30.0)
    """Pause before a worker of a gateway that ended is started again."""
    worker_steady_s: float = 60.0
    """A worker that ran for so long is started again after the first pause."""

    heap_kept_bytes: int = 64 * 1024 * 1024
    """Free memory at the end of a heap that the allocator keeps between two trims."""
    heap_largest_block_bytes: int = 32 * 1024 * 1024
    """Larger blocks are mapped from the system, and returned to it, each by itself; this is the
    most that glibc takes.
    """
    heap_check_interval_s: float = 5.0
    """Interval between two checks of whether to return free memory to the system."""
    heap_growth_bytes: int = 32 * 1024 * 1024
    """Growth of the resident size since the last trim that makes a trim due."""
    heap_idle_bytes: int = 1024 * 1024
    """A process with no more bytes than this in flight counts as idle."""
    heap_busy_interval_s: float = 60.0
    """Shortest interval between two trims of a process that is not idle."""

    record_overhead_bytes: int = 64 * 1024
    """Room for key, headers and record framing, besides a request of the largest size."""
    segments_per_retention: int = 8
    """Segments that a topic between two stages is divided into, so that retention can delete."""

    broker_silence_s: float = 10.0
    """After this long without a response from the broker, a process is not ready."""
    loop_stall_s: float = 10.0
    """The event loop is stuck after this long without an iteration."""
    loop_check_interval_s: float = 1.0
    """How often the watchdog posts a call to the event loop."""
    loop_lag_interval_s: float = 0.1
    """How often the lag of the event loop is measured."""
    stall_stack_frames: int = 12
    """How many of the innermost frames of a stuck event loop are logged."""
    stall_rearms_per_limit: int = 10
    """How often the event loop re-arms the faulthandler watchdog within its limit."""

    log_burst_lines: int = 20
    """How many log lines of one kind are written at once."""
    log_lines_per_s: float = 2.0
    """How many log lines of one kind are written per second in the long run."""
    log_max_kinds: int = 1000
    """Further kinds of log lines share one rate limit: libraries make up any number of them."""
    failure_lines_per_chunk: int = 8
    """Most log lines for failed requests in one chunk; the last one counts the others in `more`."""
    recent_errors: int = 50
    """How many of the last errors `/status` shows."""
    recent_error_characters: int = 500
    """Length at which the reason of such an error is cut off."""

    request_times_buffered: int = 4096
    """After this many requests of a model, their times are sorted into the histograms' buckets."""

    trace_queue_spans: int = 2048
    """Spans that wait for the collector, unless `OTEL_BSP_MAX_QUEUE_SIZE` is set."""
    trace_text_characters: int = 2048
    """Length at which the text of an attribute is cut off in a span, and above which a `tracestate`
    is left out of it: callers choose keys, correlation ids and trace states of any length."""
    trace_close_timeout_s: float = 1.5
    """How long sending the queued spans may take when the process ends."""
    trace_abort_timeout_s: float = 0.3
    """How long the exporter may take to end after that, once it was shut down."""
    trace_failure_log_interval_s: float = 60.0
    """Shortest interval between two log lines about spans that no collector took."""

    http_max_connections: int = 100
    """A further connection replaces the one that has waited for its client longest, or is closed at
    once if all of them are being answered.
    """
    http_header_timeout_s: float = 10.0
    """Time from the accept of a connection to the end of its first request's head, the TLS
    handshake included.
    """
    http_idle_timeout_s: float = 75.0
    """Time from an answer to the end of the next request's head."""
    http_request_timeout_s: float = 10.0
    """Time from a request's head to its answer, its body included."""
    http_body_bytes: int = 64 * 1024
    """Largest body of a request."""
    http_untaken_bytes: int = 16 * 1024 * 1024
    """Answers that wait for their clients to take them; of more, those that have waited longest are
    dropped with their connections. The newest one alone may have more.
    """
    http_take_timeout_s: float = 10.0
    """Time for a client to take an answer, and a second more for each `http_take_bytes_per_s`."""
    http_take_bytes_per_s: float = 64 * 1024
    """Clients that read a large answer more slowly are cut off."""
    http_part_bytes: int = 64 * 1024
    """Larger answers are written in parts of so many bytes, see `GatewayTuning.answer_part_bytes`.
    """
    http_accept_retry_s: float = 1.0
    """Pause while the process has no file descriptor or memory for another connection."""
    http_stop_timeout_s: float = 1.0
    """Time for open requests to end when the server stops."""
    http_access: AccessTuning = AccessTuning()
    """Tuning values of the logins of callers."""


class GatewayTuning(Struct, frozen=True):
    """Tuning values of `headrace.gateway`."""

    unread_body_timeout_s: float = 10.0
    """Time to read the rest of a body that was answered before its end, and at most
    `gateway.body_timeout_s`: to close at once would reset the answer.
    """
    max_streams: int = 1024
    """Concurrent calls on one gRPC connection; a further one waits at its client."""
    spare_calls: int = 256
    """gRPC calls beside `gateway.max_in_flight`, quiet streams and watches: so many of each method
    of health and metadata.
    """
    max_quiet_streams: int = 512
    """gRPC streams of one method without a request under way; a further one ends the one that has
    been quiet for longest.
    """
    max_watches: int = 512
    """Watches of the health over gRPC; a further one ends the oldest. gRPC's clients have one on
    each connection if they are told to check health.
    """
    max_waiting_calls: int = 1024
    """gRPC calls of one method whose message has not come, or whose caller has not taken the end; a
    further one cancels the one that has waited longest. Most wait for a few turns of the event
    loop.
    """
    end_timeout_s: float = 10.0
    """A gRPC call is cancelled, and a connection over HTTP closed, if its caller does not take its
    end within so long, and a second more for each `end_bytes_per_s` of its answer.
    """
    end_bytes_per_s: float = 64 * 1024
    """Clients that read a large answer more slowly are cut off."""
    answer_part_bytes: int = 64 * 1024
    """Larger answers over HTTP are written in parts of so many bytes, each once the connection has
    room: over TLS all that is written is kept a second time, encrypted.
    """
    requests_per_stream: int = 64
    """Requests of one gRPC stream that are under way at once; further ones are read later."""
    unread_bytes_per_stream: int = 16 * 1024 * 1024
    """Further requests of a gRPC stream are read only while those under way and the answers that
    its caller has not read have no more bytes.
    """
    accepted_at_once: int = 8
    """gRPC calls of one method that are requested from gRPC's core at once, and so may be accepted
    in one turn of the event loop; with 0, one call is accepted after the other.
    """
    grouped_pause_s: float = 0.001
    """A gRPC call that waits for others goes on after so long without a further call."""
    grouped_most_s: float = 0.005
    """The same, from its arrival on, if others keep coming: about 35 calls are accepted then."""
    grouped_turns: int = 10
    """Turns of the event loop from the arrival of a call until gRPC passes it on, with a margin."""
    grouped_least_calls: int = 12
    """Calls that have to go on together for a wait to be worth its time: two or three callers that
    wait for each other's answers get less done with it than without.
    """
    grouped_most_passed: int = 127
    """Calls that go on at once between two waits while the waits are not worth their time: one in
    128 waits then, which is beyond the 99th percentile.
    """
    health_interval_s: float = 0.25
    """Between two looks at the health for those that watch it over gRPC."""
    ping_interval_s: float = 10.0
    """Least time between two pings of a gRPC client without a call; more often is an attack."""
    error_characters: int = 1000
    """Limit of an error's text over gRPC, where it is a header, in which each byte that is not
    printable ASCII takes three characters. Headers are limited to 8 KiB.
    """
    shown_names: int = 8
    """Names of a wrong object in `:predict` that its error repeats."""
    max_predict_values: int = 1_048_576
    """Most values in the JSON of `:predict`, which are decoded as a whole: so many hold the
    interpreter for 0.2 to 0.3 s. They are five images of 224 x 224 pixels, which have 201,000 each,
    their arrays and commas counted.
    """
    max_idle_callers: int = 10_000
    """Limit of the callers without a request under way whose rates are remembered, at 400 bytes
    each; callers with requests under way are at most `gateway.max_in_flight`.
    """
    max_regions: int = 256
    """Limit of the regions of shared memory that callers have registered; each is an open file."""
    max_classes: int = 1000
    """Limit of `classification`: the strings that are made for each row."""
    classified_inline: int = 256
    """Elements of an output whose classes are found on the event loop: 25 rows of ten take 0.5 ms.
    A larger output goes to a thread, which costs 0.1 ms.
    """
    conversion_threads: int = 2
    """Threads that convert large bodies, each of at most `gateway.max_body_bytes`."""
    converted_inline_bytes: int = 32 * 1024
    """Larger JSON, BYTES and answers to be compressed are converted on a thread. So much takes at
    most 8 ms, which are strings of one character in JSON, and mostly 0.2 ms; a thread costs 0.1 ms.
    """
    encoded_inline_elements: int = 8192
    """Answers with more elements in JSON, or of BYTES, are encoded on a thread: so many take up to
    5 ms.
    """
    contents_part_elements: int = 65_536
    """Elements in `contents` over gRPC that are converted at a time, with the interpreter held: so
    many take 3 ms.
    """
    unchecked_message_bytes: int = 32 * 1024
    """The number of parts of larger messages over gRPC is checked before they are parsed: so much
    is parsed in 1 ms, whatever is in it.
    """
    max_contents_values: int = 65_536
    """Most strings, and numbers that are not packed, in all `contents` of such a message: so many
    are walked in 40 ms.
    """
    max_contents_integers: int = 4 * 1024 * 1024
    """Most packed integers and booleans in them: so many are parsed in 60 ms."""
    max_other_fields: int = 16
    """Most fields of such a message, or of an input or output, besides its repeated ones: it has
    three, and newer clients may know more. The most parts together are walked in 18 ms.
    """
    inflated_inline_bytes: int = 1024
    """Bodies of more bytes in gzip or deflate are decompressed on a thread: so many may become 1
    MiB, which takes 6 ms. Those in br and zstd always are.
    """
    compressed_from_bytes: int = 1024
    """Smaller answers are not compressed for callers that accept that."""
    retry_after_s: int = 1
    """Sent to callers if the time to wait is not known."""
    drain_silence_s: float = 0.2
    """Without a request for so long, a gateway that drains closes the idle connections."""
    drain_refusal_s: float = 1.0
    """A gRPC call that is refused in a drain waits so long for its connection to be closed first.
    Longer than `drain_silence_s`, so that most drains refuse each caller once.
    """
    stop_timeout_s: float = 1.0
    """Time for what is under way when the drain's own time is over."""
    access: AccessTuning = AccessTuning()
    """Tuning values of the logins of callers."""


class Tuning(Struct, frozen=True):
    """Tuning values of a process, by package."""

    consumer: ConsumerTuning = ConsumerTuning()
    delivery: DeliveryTuning = DeliveryTuning()
    protocol: ProtocolTuning = ProtocolTuning()
    transport: TransportTuning = TransportTuning()
    kafka: KafkaTuning = KafkaTuning()
    memory: MemoryTuning = MemoryTuning()
    models: ModelTuning = ModelTuning()
    control: ControlTuning = ControlTuning()
    schemas: SchemaTuning = SchemaTuning()
    claims: ClaimTuning = ClaimTuning()
    transforms: TransformTuning = TransformTuning()
    ingest: IngestTuning = IngestTuning()
    batcher: BatcherTuning = BatcherTuning()
    executor: ExecutorTuning = ExecutorTuning()
    responder: ResponderTuning = ResponderTuning()
    runtime: RuntimeTuning = RuntimeTuning()
    gateway: GatewayTuning = GatewayTuning()


TUNING = Tuning()
"""The default values."""
