"""Every bound of the system, with its reason. Units come last in a name."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# -- names and messages (public: part of the API) ---------------------------------------------------------
NAME_CHARS = 127  # fits a file name and a Parquet path beside a suffix
MESSAGE_BYTES = 4 * MIB  # largest body; a topic may set less
KEY_BYTES = 1 * KIB  # keys are hashed on every produce and stand in Parquet statistics
TAG_BYTES = 127  # a tag is a name-like word, repeated in every message
PROPERTIES_BYTES = 32 * KIB  # names and values together
BATCH_BYTES = 16 * MIB  # one request; also the largest frame, so that a segment holds many
BATCH_MESSAGES = 10_000  # one request; bounds one answer and one turn of the loop
BATCH_OVERHEAD_BYTES = (
    4 * MIB
)  # what Arrow's offsets, bitmaps and padding may add to a batch, on the wire and in a frame
ARROW_BATCHES = 1_024  # record batches of one produced stream: ten rows each fill the largest request
ARROW_METADATA_BYTES = 64 * KIB  # one Arrow message's own description; ours take under 1 KiB
DEDUP_ID_BYTES = 256  # a UUID or a path; hashed, never stored
ORIGIN_BYTES = 1 * KIB  # where a replayed message came from, as JSON
PRODUCER_ID_BYTES = 256  # holds "replay.<name>.<queue>"
OFFSET_MOST = 2**62  # that anybody may name
SEQUENCE_MOST = 2**62  # of producer sessions: stays a signed 64-bit integer with room for sums
RECEIVE_MESSAGES = 1_000  # as JSON or msgpack: each message costs microseconds there
RECEIVE_ROWS = 32_768  # as Arrow: 3 MB of messages of 100 bytes; a third of what a group may hold of a queue
RECEIVE_BYTES = 4 * MIB  # default for one receive; one message is always given
RECEIVE_BYTES_MOST = 16 * MIB
READ_MESSAGES = 10_000
WAIT_MS = 30_000  # long polls stay below the idle timeouts of usual load balancers (60 s)
LEASE_MS_LEAST = 1_000
LEASE_MS_MOST = 12 * 3_600_000
LEASE_MS = 30_000  # default
DELAY_MS_MOST = 365 * 86_400_000
QUEUES_PER_TOPIC = 1_024
QUEUES_DEFAULT = 4
SETTLE_ITEMS = 10_000  # one settle call; receipts settle any number of rows with one item
PAGE_SIZE = 100
PAGE_SIZE_MOST = 1_000
TIMESTAMP_MS_MOST = 253_402_300_799_999  # 9999-12-31: what every reader of a timestamp can represent

# -- HTTP -------------------------------------------------------------------------------------------------
HEADER_BYTES = 16 * KIB  # of one request, all header lines
HEADER_SECONDS = 10  # to send a request's head, counted from its first byte
BODY_SECONDS = 30  # to send a request's body, plus
BODY_BYTES_PER_SECOND = 64 * KIB  # .. one second for each of these: slower is a slow-body attack
IDLE_SECONDS = 75  # a kept-alive connection between requests (above the 60 s of usual load balancers)
CONNECTIONS = 16_384  # per listener; further ones are answered 503 and closed
TARGETS = 1_024  # request targets whose routes a listener remembers; more, and it begins anew
TARGET_CHARS = 256  # .. longer ones are looked up each time
PROXY_PROCESSES = 64  # behind one port: beyond some cores a store, not its proxies, is what is busy
ANSWER_SLICE_BYTES = 256 * KIB  # JSON is encoded in slices of this, with a turn of the loop between
ANSWER_COLUMN_BYTES = 2 * MIB  # .. or of this where whole columns are put together: 0.8 ms
TURN_ROWS = 256  # a batch of so many costs 50 to 150 us at each step of its way out: the loop gets a turn behind it

# -- store ------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 256 * MIB  # default; large enough that recycling is rare, small enough to recycle early
SEGMENT_BYTES_LEAST = 64 * KIB  # tests
UNFLUSHED_BYTES = 64 * MIB  # produces wait above it
UNFLUSHED_WAIT_MS = 2_000  # .. at most so long, then 503 flush_behind
GATHER_BYTES = 32 * MIB  # one group write; bounds its latency and memory
QUEUE_PENDING_ROWS = 50_000  # a proxy's messages waiting for one queue's append to return; then 503 flush_behind
COALESCE_BYTES = 64 * KIB  # batches up to here share a frame with others; larger ones are a frame of their own
COALESCE_QUEUES = 64  # .. and so many queues of which each has no more than that share a call of their store ..
COALESCE_CALL_BYTES = 1 * MIB  # .. with so much in all
COALESCE_MS = 20  # .. longer than which no other queue waits for a call without a flush; most take less than 1
DUPLICATE_ROUNDS = 3  # an append is submitted at most so often, each time without the duplicates named
PENDING_APPEND_BYTES = 128 * MIB  # accepted and not yet written, over all queues; then 503 flush_behind
UNSETTLED_ROWS = 100_000  # per group and queue; then receive answers in_flight_full
SCAN_ENTRIES = 262_144  # index entries one receive may filter in one queue (5 MiB of index)
WAITERS = 20_000  # long polls waiting in one store
ATTEMPT_ID_SECONDS = 60  # a repeated receive with the same attempt_id gets the same leases
ATTEMPT_IDS = 100_000  # remembered at once; the oldest goes first
ATTEMPT_BYTES = 16 * MIB  # .. and so many bytes of their rows, where these are no runs
PRODUCER_IDLE_MS = 7 * 86_400_000
PRODUCER_PARTS = 8  # last parts of a session that keep their offsets for repeat answers
PRODUCER_SESSIONS = 1_000_000  # per store
DEDUP_WINDOW_MS = 300_000  # default of a topic
DEDUP_ENTRIES = 1_000_000  # per tenant and store; 28 MB
DEDUP_BUCKET_MS = 10_000
CHECKPOINT_BYTES = 32 * MIB  # of log between checkpoints: bounds replay at start to well under a second
CHECKPOINT_FRAMES = 20_000
MARK_IDLE_MS = 20  # without an append, while the last frame is not covered
CLAIM_MS = 5_000  # a range handed to a proxy for filtering, in memory only
INLINE_FRAME_BYTES = 64 * KIB  # frames up to here travel with a grant even when it takes few of their rows
RECENT_BYTES = 48 * MIB  # the last frames, kept in memory for who follows the tail
RECENT_UNASKED_BYTES = 256 * MIB  # .. until so much was appended and none of them asked for
BEGUN_BYTES = 32 * MIB  # frames that were read for a part of their rows, kept for who reads on: two of the largest
BEGUN_SECONDS = 4.0  # .. until none was begun for so long: they are not held at rest
AHEAD_BYTES = 48 * MIB  # held by frames that were read before they are asked for
AHEAD_LEAST_BYTES = 512 * KIB  # smaller reads are not worth one ahead of them
AHEAD_SECONDS = 2.0  # how long such a frame waits to be asked for
RESERVED_STATE_BYTES = 4 * MIB  # of the last free segment, kept for acks when the disk is full

# -- tier -------------------------------------------------------------------------------------------------
SEAL_BYTES = 64 * MIB
SEAL_TRICKLE_BYTES = 4 * MIB
SEAL_TRICKLE_MS = 600_000
SEAL_AGE_MS = 6 * 3_600_000
ROW_GROUP_BYTES = 4 * MIB
ROW_GROUPS_PER_OBJECT = 64
TIER_CACHE_BYTES = 64 * MIB  # footers and row groups, per proxy process
FRAME_CACHE_BYTES = 32 * MIB  # decoded frames, per proxy process
COLD_READS = 4  # decoding at once, per proxy process
OBJECT_SECONDS = 30  # one request to the object store
OBJECT_THREADS = 8
OBJECT_CONNECT_SECONDS = 5
OBJECT_BYTES_PER_SECOND = 1 * MIB  # a request gets one second more for each of these that it carries
OBJECT_ATTEMPTS = 4  # of one request, with jittered pauses that triple; then tier_unavailable
OBJECT_PAUSE_SECONDS = 0.2  # mean of the first pause between attempts: 2.6 s in all
OBJECT_KEY_BYTES = 1_024  # S3's own limit
OBJECT_PART_BYTES = 255  # a file name, where the tier is a directory
OBJECT_TEMPORARY_MS = 86_400_000  # a temporary file this old belongs to no living process
TIER_FOOTER_BYTES = 1 * MIB  # a footer of 64 row groups takes about 100 KiB; a larger claim is not one of ours
COLD_READS_WAITING = 256  # loads of footers and row groups waiting for a turn, per tenant; then 429 cold_read_limit
SEAL_QUEUES = ROW_GROUPS_PER_OBJECT // 2  # queues in one object: each may end with a short row group
SEAL_READ_BYTES = 4 * MIB  # of frames read from the log in one go
SEAL_STREAM_BYTES = 4 * MIB  # of an object hashed and written at once: who waits for a disk then waits for a core
SEAL_STREAM_STEPS = 2  # of these between the encoder and the disk
SEAL_STEP_SECONDS = 60  # one step of a run: a few MiB read, encoded or written; else the disk hangs
SEAL_MESSAGE_BYTES = (
    16 * MIB
)  # between a store and its sealing process: the largest, a topic of 1,024 queues, has 200 KiB
SEAL_SPOTS = 1_024  # frames whose places the sealing process is told at once: about 1 ms of the store's loop
SEAL_SPOT_BYTES = 64 * MIB  # .. or frames of so much
SEAL_ALIVE_SECONDS = 5  # how often the sealing process says that it is there
SEAL_SILENT_SECONDS = 120  # .. and after so long it hangs and is killed; it runs only when nobody else wants the core
SEAL_END_SECONDS = 5  # to remove what it has staged when it is told to end; then it is killed
SEAL_REST_SECONDS = 20  # without work: it ends. Another one takes 0.3 to 0.65 s of CPU to start
SEAL_GENTLE_BYTES_PER_SECOND = 16 * MIB  # sealed while the store is at work, or twice of what is appended
SEAL_BUSY_BYTES_PER_SECOND = 64 * MIB  # appended faster than this: full runs wait for a quieter moment ..
SEAL_POSTPONE_SECONDS = 30  # .. for so long
SEAL_POSTPONE_BYTES = 4 * 1024 * MIB  # .. or so much, or an eighth of `local_bytes`, and not again before it was quiet
SEAL_TICK_SECONDS = 5  # how often topics are looked at when nobody asks
SEAL_PAUSE_SECONDS_MOST = 60  # between rounds while the tier or the metadata is away
SEAL_COMMIT_ATTEMPTS = 4  # of one commit while the metadata does not answer

# -- Spark -------------------------------------------------------------------------------------------------
SPARK_CALL_SECONDS = 30.0  # one call of a task
SPARK_RETRY_SECONDS = 60.0  # a restart of the service, its recovery included, fails no Spark job
SPARK_PARTITION_BYTES = 96 * MIB  # of tier objects; a task costs about 50 ms of Python beside its data
SPARK_PARTITION_ROWS = 2_000_000  # tiny messages: a task stays short enough to be repeated
REPLAY_PART_BYTES = 8 * MIB  # of one publish, or one larger message: well below the batch limit
REPLAY_PENDING_BYTES = 8 * MIB  # selected and not yet published, per task
REPLAY_SCANNED_ROWS = 200_000  # between two boundaries, however few rows are selected
REPLAY_ROUND_SECONDS = 5.0  # a task works so long between two reports; the first round takes a fifth of it
REPLAY_OUT_OF_STEP = 5  # how often one part may find its session moved by a process that should be gone

# -- calls between the parts ------------------------------------------------------------------------------
CALL_MS = 10_000  # default deadline of a call that does not wait for messages
CATALOG_STALE_SECONDS = 900  # a proxy goes on with its cached catalog for so long

# -- clients ----------------------------------------------------------------------------------------------
CLIENT_CONNECTIONS = 128  # per Connection: more would only queue in the service
CLIENT_CONNECT_SECONDS = 10  # a service that does not accept within this is away
CLIENT_IDLE_SECONDS = 60  # below the service's IDLE_SECONDS, so that it is not the one to close
CLIENT_HEAD_BYTES = 64 * KIB  # the head of one answer, also between parts; small answers stand behind it
CLIENT_ANSWER_BYTES = 256 * MIB  # the largest answer believed; receives and reads are bounded far below
CLIENT_RETRY_AFTER_SECONDS = 60  # what a Retry-After may ask of a client at most
CLIENT_RETRY_SECONDS = 120  # default of a consumer, and of who follows a queue: a service that restarts comes back
CLIENT_BATCH_BYTES = 1 * MIB  # default of a producer's batches: large enough that a request's cost vanishes
CLIENT_BATCHES_AT_ONCE = 4  # what waited while a request was in flight goes with the next: at most so much at once
CLIENT_BUFFER_BYTES = 64 * MIB  # default of a producer: taken and not yet answered
CLIENT_LINGER_MS = 5  # default of a producer: how long a batch waits to fill
CLIENT_SEND_MS = 120_000  # default of a producer: how long a batch is tried
CLIENT_PREFETCH_MESSAGES = 2_000  # default of a consumer: fetched and not yet handed out ..
CLIENT_PREFETCH_SECONDS = 0.25  # .. or what it handles within this, when that is more ..
CLIENT_PREFETCH_MOST = 3 * RECEIVE_ROWS  # .. up to this: one receive of the largest at hand, two on their way
CLIENT_PREFETCH_BYTES = 32 * MIB  # fetched and not yet handed out, whatever the number
CLIENT_SETTLE_MS = 20  # automatic acks gather for so long ..
CLIENT_SETTLE_ROWS = 4_096  # .. or until there are so many: the rows that a queue may have in flight must not run out

# -- metadata ---------------------------------------------------------------------------------------------
METADATA_THREADS = 4  # database calls at once per process; also its connections
METADATA_PENDING = 1_024  # calls waiting for a thread; further ones are 503 at once
METADATA_BUSY_MS = 4_000  # to wait for another process's lock; below CALL_MS, so that the caller learns why
METADATA_RETRIES = 8  # of a transaction that a concurrent one pushed aside (PostgreSQL)
FEED_POLL_MS = 1_000  # how soon a waiting `changes` notices another process's write
FEED_TOMBSTONES = 10_000  # deleted ids remembered; whoever is further behind starts afresh
LEASE_KEY_ROTATE_MS = 86_400_000
LEASE_KEY_KEEP_MS = 7 * 86_400_000  # after it signed its last: a lease may be extended far past its own 12 h
DEDUP_WINDOW_MS_MOST = 86_400_000  # bounds what a store must remember
FILTER_CHARS = 4_096  # a group's tag expression
DETAIL_CHARS = 4_096  # free text beside a state

# -- consuming, in a proxy --------------------------------------------------------------------------------
LEASE_KEYS_SECONDS = 60  # the keys that sign lease tokens are asked for again: they are made a day ahead
LEASE_KEYS_RELOAD_SECONDS = 1  # .. for a token of an unknown key at most so often: forged ones cost no metadata calls
TAG_EXPRESSION_TAGS = 100  # tags in one expression: bounds what is compared for each message
RECEIPT_RANGES = 1_000  # ranges of rows in one receipt, and in one item of a settle call: a text of 10 KB
QUEUE_LISTS = 10_000  # topics whose queues are kept in the form that a store asks for; some 100 bytes a queue
TIER_WINDOW_OFFSETS = 100_000  # of a queue's manifest fetched at once: a few objects of usual size
TIER_WINDOWS = 1_024  # queues whose window is remembered
READ_STEPS = 64  # store and tier calls of one read: bounds a filtered scan
SCAN_BYTES = 64 * MIB  # read and dropped by the tag filter in one call: an empty answer has still made progress
DAMAGED_AGAIN_MS = 60_000  # until a message in a damaged range of the log is handed out again: it may be repaired
FIND_FRAMES = 1_000  # frames opened in one search by key
FIND_OBJECTS = 256  # tier objects opened in one search by key
FIND_MESSAGES = 100  # default of one search

assert SEGMENT_BYTES >= 4 * BATCH_BYTES, "a segment holds at least four of the largest frames"
assert RECEIVE_BYTES_MOST >= MESSAGE_BYTES, "a receive can carry the largest message"
assert 2 * BATCH_BYTES < 2**31, "Arrow's 32-bit offsets address every batch"

# What a process's environment tells glibc so that it keeps what is freed: fresh pages cost more than their use. 32 MiB
# is the most that it takes for the first.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(256 * MIB)}
