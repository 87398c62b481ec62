-- Put behind row.lua: what is kept of requests that may come again (ADR 0053).

local HOUR_MS = 3600 * 1000

-- Returns 'answered', 'key_reused' or 'answers' for a request that is not to be run, nil for any other. KEYS[5]: what it
-- was answered, KEYS[6]: bytes of the tenant's kept answers by the hour they were kept in.
local function answered(request, bytes_max, now_ms)
  if request == '' then
    return nil
  end
  local known = redis.call('HGET', KEYS[5], 'request')
  if known == request then
    -- Written again, so that a WAIT behind it waits for the answer; by what a full Redis takes, too.
    redis.call('PEXPIRE', KEYS[5], redis.call('PTTL', KEYS[5]))
    return 'answered'
  elseif known then
    return 'key_reused'
  end
  local bytes, since = 0, math.floor(now_ms / HOUR_MS) - ANSWER_KEPT_MS / HOUR_MS
  local by_hour = redis.call('HGETALL', KEYS[6])
  for i = 1, #by_hour, 2 do
    if tonumber(by_hour[i]) > since then
      bytes = bytes + tonumber(by_hour[i + 1])
    end
  end
  return bytes >= bytes_max and 'answers' or nil
end

-- Keeps what a request is answered when it comes again.
local function keep_answer(request, answer, generation, expires_at_ms, now_ms)
  redis.call('HSET', KEYS[5],
    'request', request, 'answer', answer, 'generation', generation, 'expires_at_ms', expires_at_ms)
  redis.call('PEXPIRE', KEYS[5], integer(ANSWER_KEPT_MS))
  local hour = math.floor(now_ms / HOUR_MS)
  local kept = redis.call('HGET', KEYS[6], integer(hour)) or '0'
  redis.call('HSET', KEYS[6], integer(hour), integer(tonumber(kept) + #answer))
  local by_hour = redis.call('HGETALL', KEYS[6])
  for i = 1, #by_hour, 2 do
    if tonumber(by_hour[i]) <= hour - ANSWER_KEPT_MS / HOUR_MS then
      redis.call('HDEL', KEYS[6], by_hour[i])
    end
  end
  redis.call('PEXPIRE', KEYS[6], integer(ANSWER_KEPT_MS + HOUR_MS))
end
