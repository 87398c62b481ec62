-- Put behind trunks.lua: how the rules of row.py write a row.
--
-- Scripts about one session answer {'ok', row as a flat list, time, ...} or {refusal, number}. Nothing is written before a
-- refusal, but by `answered`.
-- A script that has written a row ends with `stored`: no key of ours is ever without an end.

-- A life longer than this is a damaged number.
local YEAR_MS = 366 * 24 * 3600 * 1000

local function read_row(key)
  return row_of(redis.call('HGETALL', key))
end

local function lease_lives(row, now_ms)
  return row.lease_id ~= '' and tonumber(row.lease_until_ms) > now_ms
end

-- Marks of the row's transcript, see row.py: {{mark, leading segments behind it}, ...}, the newest first.
local function read_marks(row)
  local marks = {}
  if row.marks and string.match(row.marks, '^%d+') == row.generation then
    for mark, known in string.gmatch(row.marks, ' ([^ :]+):(%d+)') do
      marks[#marks + 1] = {mark, tonumber(known)}
    end
  end
  return marks
end

-- Returns for how long Redis keeps what is needed until `until_ms`. Counted from now and never less than the grace, so
-- that no clock, however wrong, makes Redis delete what was written just now.
local function keep_ms(until_ms, now_ms, tombstone_ms)
  return math.max(until_ms - now_ms, 0) + tombstone_ms + GRACE_MS
end

-- Returns how many are in a set. One of another type has nobody.
local function count(set)
  local number = redis.pcall('ZCARD', set)
  return type(number) == 'number' and number or 0
end

-- Lets a set live for `ms` at least. One without an end is of the release before: the others in it need
-- `longest_ms` at most.
local function keep_set(set, ms, longest_ms)
  local left_ms = redis.call('PTTL', set)
  if left_ms < 0 and count(set) > 1 then
    ms = math.max(ms, longest_ms)
  end
  if left_ms < ms then
    redis.call('PEXPIRE', set, integer(ms))
  end
end

-- Takes back what `count_row` counted.
local function uncount_row(ledger, row, now_ms)
  local bytes, hour = string.match(row.counted or '', '^(%d+)@(%d+)$')
  if bytes then
    add_bytes(ledger, tonumber(hour) * HOUR_MS, -tonumber(bytes), now_ms)
  end
end

-- Puts a session where sweeps and lists find it, and dates its keys.
-- `keys` are session, transcript, expiry set and tenant set.
local function enter(keys, member, id, row, now_ms, tombstone_ms)
  local session, transcript, expiry, tenant = unpack(keys)
  redis.call('ZADD', expiry, integer(due_at_ms(row)), member)
  -- A spoilt one costs a tenant its list, not its turns.
  redis.pcall('ZADD', tenant, row.created_at_ms, id)
  local ms = keep_ms(due_at_ms(row), now_ms, tombstone_ms)
  redis.call('PEXPIRE', session, integer(ms))
  redis.call('PEXPIRE', transcript, integer(ms))
  local latest = tonumber(redis.call('ZREVRANGE', expiry, 0, 0, 'WITHSCORES')[2])
  local longest_ms = keep_ms(math.min(latest, now_ms + YEAR_MS), now_ms, tombstone_ms)
  keep_set(expiry, ms, longest_ms)
  keep_set(tenant, ms, longest_ms)
end

-- Counts a row's bytes where they end, again when either has changed. Its field `counted`: bytes@hour.
local function count_row(session, transcript, ledger, row, now_ms, ms)
  local bytes = CONTEXT_BYTES + #(row.metadata or '') + (tonumber(row.segment_bytes) or 0)
  local counted = integer(bytes) .. '@' .. integer(hour_of(due_at_ms(row)))
  if row.counted ~= counted then
    uncount_row(ledger, row, now_ms)
    add_bytes(ledger, due_at_ms(row), bytes, now_ms)
    redis.call('HSET', session, 'counted', counted)
    if string.match(row.counted or '', '@(%d+)$') ~= string.match(counted, '@(%d+)$') then
      keep_trunks(transcript, ledger, row, due_at_ms(row), ms, now_ms)
    end
  end
  keep_ledger(ledger, ms)
end

-- Lets the life of a sliding row start again. `session`: its key, where that is not SESSION.
local function restart_if_sliding(row, now_ms, session)
  if row.ttl_policy == 'sliding' then
    redis.call('HSET', session or SESSION, 'expires_at_ms', integer(now_ms + tonumber(row.ttl_s) * 1000))
  end
end

-- Enters, counts and dates a row that was written, and returns it as a flat list.
local function kept(session, transcript, turns, member, id)
  local flat = redis.call('HGETALL', session)
  local row = row_of(flat)
  enter({session, transcript, EXPIRY, TENANT}, member, id, row, now_ms, tombstone_ms)
  count_row(session, transcript, LEDGER, row, now_ms, keep_ms(due_at_ms(row), now_ms, tombstone_ms))
  redis.call('PEXPIRE', turns, redis.call('PTTL', session))
  return flat
end

-- The end of every script that has written a row and leaves it: its answer.
local function stored()
  return {'ok', kept(SESSION, TRANSCRIPT, TURNS, a.member, a.id), integer(now_ms)}
end

-- The answer of a script that has written nothing.
local function as_it_is()
  return {'ok', redis.call('HGETALL', SESSION), integer(now_ms)}
end

-- Remembers where in the lists a row was that is gone: a client goes on behind it, page by page.
local function remember_place(place, ledger, created_at_ms, now_ms, tombstone_ms)
  if tombstone_ms > 0 then
    if redis.call('EXISTS', place) == 0 then
      add_bytes(ledger, now_ms + tombstone_ms, PLACE_BYTES, now_ms)
    end
    -- A spoilt one costs a client its page, not a sweep.
    redis.pcall('HSET', place, 'created_at_ms', created_at_ms)
    redis.call('PEXPIRE', place, integer(tombstone_ms))
    keep_ledger(ledger, tombstone_ms)
  end
end

-- The end of every script that takes a row away. `place`: remembers where in the lists it was, if that matters.
local function removed(row, place)
  -- First frees memory: a full Redis lets a script write when it has begun so, and refuses it otherwise.
  redis.call('UNLINK', SESSION, TRANSCRIPT, TURNS)
  redis.call('ZREM', EXPIRY, a.member)
  redis.pcall('ZREM', TENANT, a.id)
  release_trunks(TRANSCRIPT, LEDGER, row, now_ms)
  uncount_row(LEDGER, row, now_ms)
  if place then
    remember_place(place, LEDGER, row.created_at_ms, now_ms, tombstone_ms)
  end
end

-- Returns the endpoints that may have KV of a session, '\n' between them, once `name` may too; '*' for any endpoint: the
-- row is or was a manager's of an older release, nobody said where, or they are more than HOLDERS_MAX.
local function with_holder(row, name)
  local holders = row.holders
  if not holders or holders == '*' or name == '' then
    return '*'
  end
  local count, is_known, counts_last = 0, false, row.holder == ''
  for known in string.gmatch(holders, '[^\n]+') do
    is_known = is_known or known == name
    counts_last = counts_last or known == row.holder
    count = count + 1
  end
  if not counts_last or (count >= HOLDERS_MAX and not is_known) then
    return '*'
  end
  if is_known then
    return holders
  end
  return holders == '' and name or holders .. '\n' .. name
end
