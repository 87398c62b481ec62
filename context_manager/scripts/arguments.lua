-- Put in front of every script: its arguments by name, its keys by name, and the time.
--
-- ARGV[1] is a msgpack map. `tombstone_ms`: how long an expired session is remembered. `now_ms`: a test's time.
-- What msgpack of Redis cannot hold (bytes) follows as ARGV[2] and so on.
-- KEYS of a script about one session are those of `session_keys` in layout.py, in this order. ANSWER is there only for a
-- request that may come again.

local a = cmsgpack.unpack(ARGV[1])
local SESSION, TRANSCRIPT, EXPIRY, TENANT, LEDGER, TURNS, PLACE, ANSWER = unpack(KEYS, 1, 8)
local tombstone_ms = a.tombstone_ms
local time = redis.call('TIME')
local now_ms = a.now_ms or time[1] * 1000 + math.floor(time[2] / 1000)
