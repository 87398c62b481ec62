-- Put in front of every other script: the rules of session_row.py for Redis.
--
-- Scripts about one session get KEYS = session hash, transcript list, expiry set, tenant set (one cluster slot) and
-- ARGV = member of the expiry set, session id, now_ms, tombstone_ms, then their own arguments.
-- They answer {'ok', row as a flat list, ...} or {refusal, number}; nothing is written before a refusal.

-- Lua writes large numbers as 1.7e+12, which Redis and Python do not read back as the same text.
local function integer(number)
  return string.format('%.0f', number)
end

local function read_row(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    return nil
  end
  local row = {}
  for i = 1, #flat, 2 do
    row[flat[i]] = flat[i + 1]
  end
  return row
end

local function due_at_ms(row)
  if row.state == 'creating' then
    return tonumber(row.lease_until_ms)
  end
  return tonumber(row.expires_at_ms)
end

local function lease_lives(row, now_ms)
  return row.lease_id ~= '' and tonumber(row.lease_until_ms) > now_ms
end

-- Returns 'absent', 'expired', 'creating' or 'live'.
local function standing(row, now_ms, tombstone_ms)
  if not row then
    return 'absent'
  end
  if row.state == 'creating' and tonumber(row.lease_until_ms) <= now_ms then
    return 'absent'
  end
  local expires_at_ms = tonumber(row.expires_at_ms)
  if row.state == 'tombstone' or expires_at_ms <= now_ms then
    if now_ms < expires_at_ms + tombstone_ms then
      return 'expired'
    end
    return 'absent'
  end
  if row.state == 'creating' then
    return 'creating'
  end
  return 'live'
end

local function is_there(where)
  return where == 'creating' or where == 'live'
end
