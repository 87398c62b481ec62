-- Put behind row.lua: what is kept of requests that may come again.

-- Returns 'answered' or 'key_reused' for a request that is not to be run, nil for any other. KEYS[6]: what it was
-- answered.
local function answered(request)
  if request == '' then
    return nil
  end
  local known = redis.call('HGET', KEYS[6], 'request')
  if known == request then
    -- Written again, so that a WAIT behind it waits for the answer; by what a full Redis takes, too.
    redis.call('PEXPIRE', KEYS[6], redis.call('PTTL', KEYS[6]))
    return 'answered'
  end
  return known and 'key_reused' or nil
end

-- Keeps what a request is answered when it comes again.
local function keep_answer(request, answer, generation, expires_at_ms, now_ms)
  redis.call('HSET', KEYS[6],
    'request', request, 'answer', answer, 'generation', generation, 'expires_at_ms', expires_at_ms)
  redis.call('PEXPIRE', KEYS[6], integer(ANSWER_KEPT_MS))
  add_bytes(KEYS[5], now_ms + ANSWER_KEPT_MS, ANSWER_BYTES + #answer, now_ms)
  keep_ledger(KEYS[5], ANSWER_KEPT_MS)
end
