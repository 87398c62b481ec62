-- Put behind arguments.lua: how many bytes a tenant has in Redis (ADR 0090).
--
-- LEDGER is the tenant's, a hash. `<hour>`: bytes that end in that hour.
-- `first`: earliest hour that counts. `sum`: bytes of all hours from `first` on.
-- Bytes whose hour has passed count no more, so bytes that no script took back cannot stay in the sum for ever.
-- CONTEXT_BYTES, ANSWER_BYTES, PLACE_BYTES and the other capitals are set in front (layout.py).

local HOUR_MS = 3600 * 1000

-- Lua writes large numbers as 1.7e+12, which Redis and Python do not read back as the same text.
local function integer(number)
  return string.format('%.0f', number)
end

local function hour_of(ms)
  return math.floor(ms / HOUR_MS)
end

-- Returns the bytes that count, and the earliest hour that counts. Writes nothing.
local function bytes_of(ledger, now_ms)
  local known = redis.pcall('HMGET', ledger, 'first', 'sum')
  local first, sum, now = tonumber(known[1] or nil), tonumber(known[2] or nil), hour_of(now_ms)
  if not first or not sum then
    return 0, now
  elseif first >= now then
    return sum, first
  end
  sum = 0
  local by_hour = redis.call('HGETALL', ledger)
  for i = 1, #by_hour, 2 do
    local hour = tonumber(by_hour[i])
    if hour and hour >= now then
      sum = sum + tonumber(by_hour[i + 1])
    end
  end
  return sum, now
end

local function forget_hours_before(ledger, first)
  for _, field in ipairs(redis.call('HKEYS', ledger)) do
    local hour = tonumber(field)
    if hour and hour < first then
      redis.call('HDEL', ledger, field)
    end
  end
end

-- Adds bytes that end at `ends_ms`; a negative number takes back what was added with that end.
local function add_bytes(ledger, ends_ms, bytes, now_ms)
  local kind = redis.call('TYPE', ledger).ok
  if kind ~= 'none' and kind ~= 'hash' then
    redis.call('UNLINK', ledger)
  end
  local sum, first = bytes_of(ledger, now_ms)
  local hour = hour_of(ends_ms)
  if bytes < 0 and hour < first then
    bytes = 0
  end
  local field = integer(math.max(hour, first))
  local there = tonumber(redis.call('HGET', ledger, field) or nil) or 0
  bytes = math.max(bytes, -there)
  if sum + bytes <= 0 then
    redis.call('UNLINK', ledger)
    return
  end
  if tonumber(redis.call('HGET', ledger, 'first') or nil) ~= first then
    forget_hours_before(ledger, first)
  end
  redis.call('HSET', ledger, 'first', integer(first), 'sum', integer(sum + bytes))
  if there + bytes > 0 then
    redis.call('HSET', ledger, field, integer(there + bytes))
  else
    redis.call('HDEL', ledger, field)
  end
end

-- Lets the ledger live for `ms` at least, and until its last hour is over.
local function keep_ledger(ledger, ms)
  local wanted_ms = ms + HOUR_MS
  if redis.call('PTTL', ledger) < wanted_ms then
    redis.call('PEXPIRE', ledger, integer(wanted_ms))
  end
end

-- Returns whether a tenant may have `more` bytes. `bytes_max`: what the ledger may come to, nil for any number.
local function has_room(ledger, more, bytes_max, now_ms)
  return not bytes_max or bytes_of(ledger, now_ms) + more <= bytes_max
end
