-- Put behind row.lua: what is used, by day and key, and what a session's last turns took.

-- Adds sums to the hash of today. `usage`: its name without the day; `said`: `<key>@<model>:<quantity> <number>` again and
-- again, with blanks between.
local function count_usage(usage, said)
  local key = usage .. integer(math.floor(now_ms / (24 * HOUR_MS)))
  -- A spoilt one costs a tenant a day's figures, not its turns.
  local kind = redis.call('TYPE', key).ok
  if said == '' or (kind ~= 'none' and kind ~= 'hash') then
    return
  end
  for field, number in string.gmatch(said, '(%S+) (%d+)') do
    redis.pcall('HINCRBY', key, field, number)
  end
  redis.call('PEXPIRE', key, integer(USAGE_KEPT_MS))
end

-- Adds a turn's tokens and saved time to the sums of its session.
local function count_saved(said)
  for name, number in string.gmatch(said, ':(%S+) (%d+)') do
    if SAVED_COUNTS[name] then
      redis.pcall('HINCRBY', SESSION, name, number)
    end
  end
end

-- Adds a turn's receipt to the last ones; the first generation's, or a fork, which has none, begins anew.
local function keep_receipt(generation, receipt)
  local key = TURNS
  local kind = redis.call('TYPE', key).ok
  if generation == 1 or (kind ~= 'none' and kind ~= 'list') then
    redis.call('UNLINK', key)
  end
  if receipt ~= '' then
    redis.call('RPUSH', key, receipt)
    redis.call('LTRIM', key, -TURNS_KEPT, -1)
  end
end
